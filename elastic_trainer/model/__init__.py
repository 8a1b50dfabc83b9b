"""The trainer's own model: a decoder, dense or a mixture of experts."""

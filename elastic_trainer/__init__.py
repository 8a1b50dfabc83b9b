"""The elastic trainer: what runs on the nodes."""

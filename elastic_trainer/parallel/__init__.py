"""Cuts the model over ranks."""

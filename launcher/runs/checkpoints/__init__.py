"""Checkpoints from the launcher's side: listed, started from, converted."""

"""Checkpoints: manifest, storage tier and manager."""

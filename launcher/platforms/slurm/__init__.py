"""Slurm by its own commands: the backend, its questions, and what the answers mean."""

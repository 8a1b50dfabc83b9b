"""What a worker is, and what agent and trainer share of it."""

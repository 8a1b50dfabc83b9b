"""For the training loops of others: docs/scripts.md."""

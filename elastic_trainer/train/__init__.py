"""The training of one worker: the built-in trainer, and what scripts of one's own share with it."""

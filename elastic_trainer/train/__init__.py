"""The training of one worker: the built-in trainer, and what a script's own loop shares with it."""

"""The agent's command line: torchrun's names where they mean the same."""

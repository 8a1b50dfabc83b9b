"""The `holdfast` command: one small module per command group, no logic."""

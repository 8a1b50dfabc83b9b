"""Looks at runs: where they stand, their logs, their stacks, and why one does not train."""

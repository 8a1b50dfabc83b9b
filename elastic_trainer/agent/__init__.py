"""The node agent: membership, and the workers of a node. Never imports the trainer."""

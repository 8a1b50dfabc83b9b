"""The node agent: membership, boards, and the care of workers. Never imports the trainer."""

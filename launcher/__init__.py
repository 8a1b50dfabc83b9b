"""The launcher: plans, renders, submits and watches jobs. Never imports torch."""

"""The launcher: plans, renders, submits and watches jobs. Never imports torch.

For programs: `from launcher.api import load_job, plan, render, submit`.
"""

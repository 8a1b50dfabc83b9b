"""The launcher: plans, renders, submits and watches jobs. Never imports torch.

Users import it as `holdfast`.
"""

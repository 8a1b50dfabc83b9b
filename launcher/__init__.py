"""The launcher: plans, renders, submits and watches jobs. Never imports torch.

For programs: `import holdfast`, which is launcher.api.
"""

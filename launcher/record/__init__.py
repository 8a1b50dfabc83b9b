"""The record of a run: its events, read by `files` and folded by the other modules.

`event` says what one event tells, `timeline` what became of each epoch and step, `failures` what
failed, how long the recovery took and which machines are excluded, `status` the present state of
training, and `summary` what summary.json holds. Only `files` opens files; the others are pure.
"""

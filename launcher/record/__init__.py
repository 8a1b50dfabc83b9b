"""The record of a run: its events, read by `files` and folded by the other modules.

`event` says what one event tells, `timeline` what became of each epoch and step, `failures` what
failed, how long the recovery took and which machines are kept out, `status` where
training stands now, and `summary` what summary.json holds. Only `files` opens files; the others are
pure.
"""

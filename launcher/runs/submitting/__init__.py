"""Submits a job file as a run, all or nothing; submits a run again; cancels it."""

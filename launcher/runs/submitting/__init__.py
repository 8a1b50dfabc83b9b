"""From a job file to a submitted run, all or nothing; submitting it again; cancelling it."""

"""Is every node fit for the job: checks, and the way they reach the nodes."""

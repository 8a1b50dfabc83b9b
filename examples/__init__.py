"""Example jobs, and the demonstration behind `make demo`."""

"""A job scaled down to this machine, with every kind of failure, before it costs GPU-hours."""

"""The job file: YAML text to a checked JobSpec, and the keys of every section. Pure."""

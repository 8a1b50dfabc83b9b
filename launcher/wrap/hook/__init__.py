"""A folder for PYTHONPATH: Python imports its `sitecustomize` at its start."""

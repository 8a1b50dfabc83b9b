"""Backends: where bundles are submitted and jobs are watched."""

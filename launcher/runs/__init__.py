"""Submits, watches and reports runs."""

"""Runbooks: a page for each class of failures, and for procedures of a fleet."""

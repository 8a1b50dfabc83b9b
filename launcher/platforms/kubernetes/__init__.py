"""Kubernetes by its API: the backend, its client, and what objects mean in words."""

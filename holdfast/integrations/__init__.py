"""Integrations with other training loops: docs/scripts.md."""

"""What the API refuses."""

from __future__ import annotations


class ApiError(Exception):
    """A call that cannot be served; the message begins with its code."""

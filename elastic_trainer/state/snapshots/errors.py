"""What can be wrong with a snapshot."""

from __future__ import annotations


class TornImageError(Exception):
    """An image that is not whole: never restored from."""


class NoRoomError(Exception):
    """An image does not fit this node's memory; the text has the numbers."""


class PeerError(Exception):
    """Another agent could not be asked, or refused; the text says why."""

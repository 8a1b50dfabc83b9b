"""What goes wrong with a corpus, and whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(Exception):
    """The corpus cannot be used: a user error, not to be retried."""


class UnreadableError(Exception):
    """The corpus cannot be read; the cause, an OSError, says why."""


@contextmanager
def reading() -> Iterator[None]:
    """Tell trouble with the corpus, the user's, from trouble with our own cache.

    Raises:
        UnreadableError: the body raised an OSError, which is the cause.
    """
    try:
        yield
    except OSError as error:
        raise UnreadableError from error

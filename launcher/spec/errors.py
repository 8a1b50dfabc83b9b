"""The exception tree of the launcher.

    HoldfastError
    ├── UserError             the user's input is wrong: exit code 2, never retried
    └── PlatformError         Slurm, Kubernetes or this machine refused: exit code 1
        ├── TemporaryError    the same call may succeed later: backends retry
        └── PermanentError    it will not: backends give up at once

Whether to retry is a type, never a flag or a text. Our own invariants are
`assert`s and have no place here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from launcher.spec.codes import CODES, WARNINGS

_LOG: Final = logging.getLogger("holdfast")

Offer = Mapping[str, Any]
"""One way out of a problem: key of the job file -> value, all to be put in together."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a problem is: file (or the --set that made it), line from 1, key."""

    file: str = ""
    line: int | None = None
    key: str = ""


NOWHERE = Where()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong in a job file or on a command line: code, place, message with values and fix.

    An error stops the job. A warning is of a job that can run, but may not be what was meant: it
    is shown apart from errors, and only `holdfast check --strict` takes it for one. The code
    decides which of the two a problem is, unless the user has.
    """

    code: str
    where: Where
    message: str
    offers: tuple[Offer, ...] = field(default=(), compare=False)
    """What the message offers: each one, put in, removes the problem and brings no new error."""
    overruled: bool = False
    """The user knows better (`submit --force`): an error is a warning."""

    def __post_init__(self) -> None:
        """Leave out what looks like a secret, whoever wrote it into a value or a path."""
        from launcher.spec.secret_forms import masked  # most commands make no Problem

        shown = Where(masked(self.where.file), self.where.line, masked(self.where.key))
        object.__setattr__(self, "where", shown)
        object.__setattr__(self, "message", masked(self.message))

    @property
    def is_warning(self) -> bool:
        """Whether the job may continue nevertheless."""
        return self.overruled or self.code in WARNINGS

    def offering(self, offers: Sequence[Offer]) -> Problem:
        """Return the problem with these ways out in its message; without any, the code's own."""
        fix = CODES[self.code].how_to_fix
        how_to_fix = (
            f"use {_ways_out(self.where.key, offers)}"
            if offers
            else fix[0].lower() + fix.removesuffix(".")[1:]
        )
        return replace(self, message=f"{self.message}; {how_to_fix}", offers=tuple(offers))

    def __str__(self) -> str:
        """Return the line people read: `job.yaml:12: HF103 layout.tp: ...`."""
        where = self.where
        place = f"{where.file}:{where.line}: " if where.line else f"{where.file}: "
        key = f"{where.key}: " if where.key else ""
        warning = "warning: " if self.is_warning else ""
        return f"{place if where.file else ''}{warning}{self.code} {key}{self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, as `--json` prints them."""
        return {
            "code": self.code,
            "file": self.where.file,
            "line": self.where.line,
            "key": self.where.key,
            "message": self.message,
            "offers": [dict(offer) for offer in self.offers],
        }


def choices(values: Sequence[object]) -> str:
    """Return `8, 4, 2 or 1`."""
    head, last = values[:-1], values[-1]
    return f"{', '.join(map(str, head))} or {last}" if head else str(last)


def _ways_out(key: str, offers: Sequence[Offer]) -> str:
    """Return `4, 2 or 1, or train.seq_len: 8192`; values without a key are those of `key`."""
    values: dict[tuple[str, str], list[str]] = {}
    for offer in offers:
        (first, value), *others = offer.items()
        beside = " and ".join(f"{other}: {_shown(each)}" for other, each in others)
        bare = first == key and isinstance(value, str | int | float) and not isinstance(value, bool)
        values.setdefault(("" if bare else f"{first}: ", beside), []).append(_shown(value))
    return ", or ".join(
        f"{name}{choices(listed)}" + (f" with {beside}" if beside else "")
        for (name, beside), listed in values.items()
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems in the order of the file; those without a line come last."""
    return sorted(
        dict.fromkeys(problems),
        key=lambda p: (p.where.line is None, p.where.line or 0, p.where.file, p.code, p.where.key),
    )


class HoldfastError(Exception):
    """Base of everything the launcher raises on purpose."""


class UserError(HoldfastError):
    """The user's input is wrong; `problems` has every problem found, at least one."""

    def __init__(self, code: str, message: str, *, where: Where = NOWHERE) -> None:
        """Make an error of one problem; `many` makes one of several."""
        super().__init__(code, message)
        self.problems = [Problem(code, where, message)]
        self.warnings: list[Problem] = []
        """What was found besides, and would not have stopped the job."""

    @classmethod
    def many(cls, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> UserError:
        """Return one error that carries all of `problems`, in the order of the file."""
        ordered = sort_problems(problems)
        assert ordered, "an error has at least one problem"
        error = cls(ordered[0].code, ordered[0].message)
        error.problems, error.warnings = ordered, sort_problems(warnings)
        return error

    @property
    def code(self) -> str:
        """Code of the first problem."""
        return self.problems[0].code

    @property
    def message(self) -> str:
        """Message of the first problem."""
        return self.problems[0].message

    def __str__(self) -> str:
        """Return one line per problem."""
        return "\n".join(str(problem) for problem in self.problems)


class PlatformError(HoldfastError):
    """The platform a job runs on refused or failed."""


class TemporaryError(PlatformError):
    """The same call may succeed later: retry with a back-off."""


class PermanentError(PlatformError):
    """The same call will fail again: do not retry."""


def reason_of(error: Exception) -> str:
    """Return what an error says, without code and numbers."""
    if isinstance(error, UserError):
        return error.message
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


@contextmanager
def advice(loss: str, say: Callable[[str], object] = _LOG.warning) -> Iterator[None]:
    """Do without what fails here, and say what is lost by that.

    For what others have written (the ledger, records, notes) before a job is submitted, requeued,
    saved or restored: advice stops none of these, whatever it holds.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  see above
        say(f"{loss}: {reason_of(error)}")


@contextmanager
def writing(what: object, fix: str = "make room, or grant the permission") -> Iterator[None]:
    """Say of an OSError that `what`, something of the run, cannot be written, and how to fix it.

    Raises:
        UserError: HF612.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError("HF612", f"{what} cannot be written: {reason}; {fix}") from error

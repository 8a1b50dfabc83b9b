"""Runs the commands of a platform: the one seam to sbatch, squeue and the like.

Every call has a time-out and its own stdin. Killing it kills its whole process group. A missing
program is a UserError; a program that does not answer is a TemporaryError.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.spec.errors import TemporaryError, UserError

MAX_SAID = 2000
"""Characters of a command's complaint that a message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command."""

    argv: tuple[str, ...]
    code: int
    """Exit code; negative: the signal that ended it."""
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Its stderr, else its stdout, without empty lines, cut at MAX_SAID."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        said = "\n".join(line.rstrip() for line in lines if line.strip())
        return shortened(said, MAX_SAID)


class TimedOutError(TemporaryError):
    """A command did not end in time: whether it did its work is unknown."""


class Commands(Protocol):
    """Runs the commands of a backend; `SystemCommands` is the real one."""

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """Run one command to its end.

        Raises:
            UserError: HF650 the program is missing.
            TimedOutError: it did not end within `timeout_s` seconds and was killed.
        """


class SystemCommands:
    """Runs programs found on PATH; `fix` is program -> what a user without it can do."""

    def __init__(
        self, env: Mapping[str, str] | None = None, *, fix: Mapping[str, str] | None = None
    ) -> None:
        self._env = dict(os.environ if env is None else env)
        self._fix = fix or {}

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """Run one command to its end; see `Commands`."""
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._env,
                start_new_session=True,  # so that its children die with it
            )
        except FileNotFoundError:
            raise self._missing(argv[0], "is not installed here, or not on the PATH") from None
        except OSError as error:
            raise self._missing(argv[0], f"cannot be run: {error.strerror or error}") from error
        with process:
            try:
                out, err = process.communicate(stdin.encode(), timeout=timeout_s)
            except BaseException as error:  # Ctrl-C too: nothing is left behind
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    shown = shortened(shlex.join(argv), 120)
                    message = f"{shown} did not answer within {timeout_s:g} s"
                    raise TimedOutError(message) from None
                raise
        return CommandResult(
            argv=tuple(argv),
            code=process.returncode,
            out=out.decode("utf-8", errors="replace"),
            err=err.decode("utf-8", errors="replace"),
        )

    def _missing(self, program: str, what: str) -> UserError:
        fix = self._fix.get(program, f"install {program}, or add its folder to PATH")
        return UserError("HF650", f"{program} {what}; {fix}")


def shortened(text: str, most: int) -> str:
    """Return a text, cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"

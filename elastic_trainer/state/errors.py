"""What can go wrong with checkpoints."""

from __future__ import annotations

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART


class CheckpointError(Exception):
    """Restarting cannot help: a person has to act. The process exits with `exit_code`."""

    exit_code = EXIT_DO_NOT_RESTART

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"{code} {message}")


class BoardAwayError(Exception):
    """The board does not answer now; the next epoch asks again, and no node is charged.

    `failures.py` knows it by its name.
    """


class DamagedError(Exception):
    """A checkpoint's data is not what its manifest says, or cannot be loaded."""


class SaveFailedError(Exception):
    """One save failed; training continues and the newest good checkpoint stays."""


class FencedError(SaveFailedError):
    """A newer epoch was published: this one may commit nothing any more."""


class UncertainError(SaveFailedError):
    """The board could not be asked whether it has the commit: its directory must stay."""


class InputError(CheckpointError):
    """The user's input cannot be used: another path or option can help."""

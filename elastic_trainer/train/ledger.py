"""The ledger: which samples each step really consumed, written from what forward got."""

from __future__ import annotations

import json
from pathlib import Path

from elastic_trainer.storage.write_behind import WriteBehind


class LedgerWriter:
    """One file per epoch and dp rank: `ledger/e<epoch>-dp<rank>.jsonl`.

    The first line says where the epoch resumed; each following one is a step and the
    samples, as [start, stop) ranges, that this rank fed to forward with weight one.
    `"skipped": true` says that the step's update was not applied: its batch is used up.

    Training does not wait for the ledger's storage; but no step counts as committed before its
    line is written (`behind`), so that what is committed is never missing here.
    """

    def __init__(
        self, run_dir: Path, *, epoch: int, dp_rank: int, resume_step: int, layout: str
    ) -> None:
        path = run_dir / "ledger" / f"e{epoch:06d}-dp{dp_rank:05d}.jsonl"
        self._file = WriteBehind(path, must_keep=True)
        self._put({"epoch": epoch, "resume_step": resume_step, "layout": layout})
        self._samples: list[list[int]] = []

    def fed(self, samples: range) -> None:
        """Note the samples of one micro-batch that went into forward."""
        if self._samples and self._samples[-1][1] == samples.start:
            self._samples[-1][1] = samples.stop
        else:
            self._samples.append([samples.start, samples.stop])

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Write the line of `step`; called once the optimizer has used or dropped its gradient."""
        line: dict[str, object] = {"step": step, "samples": self._samples}
        self._put({**line, "skipped": True} if skipped else line)
        self._samples = []

    @property
    def behind(self) -> bool:
        """Whether lines are not written yet: the storage stalls."""
        return self._file.behind > 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written, at most `timeout_s`; return whether they are."""
        return self._file.flush(timeout_s)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, line: dict[str, object]) -> None:
        self._file.put((json.dumps(line, separators=(",", ":")) + "\n").encode("ascii"))

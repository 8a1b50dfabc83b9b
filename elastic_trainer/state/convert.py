"""`python -m elastic_trainer.state.convert export|import REQUEST`: a conversion as a process.

The launcher, which has no torch, starts it. REQUEST is a JSON object: the arguments of `_export` or
`_import`. On stdout a JSON object a line: `{"done_bytes": n, "total_bytes": m}` now and then, and
at the end `{"result": {...}}`. On stderr, when it fails, one line: `HF323 message`.

Exit codes: 0 done; 1 it failed; 2 the user's input is wrong; 130 interrupted,
143 terminated. Whatever the end, the target is complete or is not there.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.board.state import Commit
from elastic_trainer.model.decoder import ModelError
from elastic_trainer.plan.models import Transformers, raw_of, shape_of
from elastic_trainer.state.collective import FAILURES
from elastic_trainer.state.errors import CheckpointError, InputError
from elastic_trainer.state.hf_convert import export_hf, import_hf
from elastic_trainer.state.storage import CheckpointStorage

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
_REPORT_EVERY_S = 0.2


class _Interrupts:
    """SIGINT and SIGTERM: the first one interrupts; later ones do not disturb the clean-up."""

    def __init__(self) -> None:
        self.code: int | None = None
        """Exit code, once a signal came."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        if self.code is None:
            self.code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
            raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one conversion and return the exit code."""
    stop = _Interrupts()
    what, request = sys.argv[1:] if argv is None else argv
    kinds: dict[str, Callable[..., dict[str, Any]]] = {"export": _export, "import": _import}
    try:
        result = kinds[what](_Reporter(stop), **json.loads(request))
    except (KeyboardInterrupt, *FAILURES) as error:
        # torch.save puts an error of its own in place of an interrupt.
        if stop.code is not None:
            return stop.code
        if isinstance(error, CheckpointError | ModelError):
            print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201  the interface
            return EXIT_WRONG_INPUT if isinstance(error, InputError | ModelError) else EXIT_FAILED
        raise
    print(json.dumps({"result": result}), flush=True)  # noqa: T201  this is the interface
    return 0


class _Reporter:
    """Writes progress to stdout: at most a few lines a second, and always the last one."""

    def __init__(self, stop: _Interrupts, mono: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._mono = stop, mono
        self._next_mono = mono()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._stop.code is not None:  # an interrupt that a library lost
            raise KeyboardInterrupt
        now = self._mono()
        if now >= self._next_mono or done_bytes == total_bytes:
            self._next_mono = now + _REPORT_EVERY_S
            line = {"done_bytes": done_bytes, "total_bytes": total_bytes}
            print(json.dumps(line), flush=True)  # noqa: T201  this is the interface


def _export(
    report: _Reporter,
    *,
    checkpoints: str,
    commit: Mapping[str, Any],
    model: Mapping[str, Any],
    out: str,
    dtype: str = "float32",
    tokenizer: str | None = None,
    beside: str | None = None,
    context: int | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    done = export_hf(
        CheckpointStorage(Path(checkpoints)),
        Commit(**commit),
        shape_of(model),
        Path(out),
        dtype=dtype,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        beside=None if beside is None else Path(beside),
        context=context,
        code=code,
        on_progress=report,
    )
    return {"files": list(done.files), "bytes": done.size_bytes, "num_params": done.num_params}


def _import(
    report: _Reporter,
    *,
    hf: str,
    run: str,
    run_id: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`model`: of transformers' own class; None: the family that config.json names."""
    run_id = run_id or f"import-{uuid.uuid4().hex[:12]}"
    shape = None if model is None else shape_of(model)
    assert shape is None or isinstance(shape, Transformers), model
    done = import_hf(Path(hf), Path(run), run_id=run_id, shape=shape, on_progress=report)
    return {
        "files": list(done.files),
        "bytes": done.size_bytes,
        "num_params": done.shape.num_params(),
        "model": raw_of(done.shape),
        "commit": dataclasses.asdict(done.commit),
    }


if __name__ == "__main__":
    sys.exit(main())

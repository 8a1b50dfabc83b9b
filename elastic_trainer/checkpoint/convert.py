"""`python -m elastic_trainer.checkpoint.convert`: one export or import, as a process.

The launcher, which has no torch, starts it. On stdout a JSON object a line:
`{"done_bytes": n, "total_bytes": m}` now and then, and at the end
`{"result": {...}}`. On stderr, when it fails, one line: `HF323 message`.

Exit codes: 0 done; 1 it failed; 2 the user's input is wrong; 130 interrupted,
143 terminated. Whatever the end, the target is complete or is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never

from elastic_trainer.agent.boards.board import Commit
from elastic_trainer.checkpoint.errors import CheckpointError, InputError
from elastic_trainer.checkpoint.hf_export import DTYPES, export_hf
from elastic_trainer.checkpoint.hf_import import import_hf
from elastic_trainer.checkpoint.storage import CheckpointStorage
from elastic_trainer.models import ModelShape

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
_REPORT_EVERY_S = 0.2


class _Stop:
    """SIGINT and SIGTERM: the first one interrupts, further ones leave the clean-up alone."""

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
    stop = _Stop()
    try:
        options = _parser().parse_args(argv)
        result = options.run(options, _Reporter(stop))
    except (KeyboardInterrupt, Exception) as error:
        # torch.save puts an error of its own in place of an interrupt.
        if stop.code is not None:
            return stop.code
        if isinstance(error, CheckpointError):
            wrong_input = isinstance(error, InputError)
            return _fail(EXIT_WRONG_INPUT if wrong_input else EXIT_FAILED, str(error))
        raise
    print(json.dumps({"result": result}), flush=True)  # noqa: T201  this is the interface
    return 0


def _fail(code: int, message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)  # noqa: T201  this is the interface
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise InputError("HF328", f"{message}; see python -m {self.prog} --help")


class _Reporter:
    """Writes progress to stdout: at most a few lines a second, and the last one always."""

    def __init__(self, stop: _Stop, mono: Callable[[], float] = time.monotonic) -> None:
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


def _export(options: argparse.Namespace, report: _Reporter) -> dict[str, Any]:
    # Only the directory and the digest matter here.
    commit = Commit(
        epoch=0, step=0, dir=options.dir, manifest_sha256=options.manifest_sha256.lower()
    )
    done = export_hf(
        CheckpointStorage(options.checkpoints),
        commit,
        options.model_shape,
        options.out,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
        context=options.context,
        on_progress=report,
    )
    return {"files": list(done.files), "bytes": done.size_bytes, "num_params": done.num_params}


def _import(options: argparse.Namespace, report: _Reporter) -> dict[str, Any]:
    run_id = options.run_id or f"import-{uuid.uuid4().hex[:12]}"
    done = import_hf(options.hf, options.run_dir, run_id=run_id, on_progress=report)
    return {
        "files": list(done.files),
        "bytes": done.size_bytes,
        "num_params": done.shape.num_params(),
        "model": dataclasses.asdict(done.shape),
        "commit": dataclasses.asdict(done.commit),
    }


def _shape(text: str) -> ModelShape:
    try:
        shape = ModelShape(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_shape(str(error)) from error
    for name, value in dataclasses.asdict(shape).items():
        if not isinstance(value, int | float) or value < 0:
            raise _no_shape(f"{name} is {value!r}")
    return shape


def _no_shape(reason: str) -> InputError:
    return InputError(
        "HF328", f"--model-shape: {reason}; give the `model` of the run's job.json as JSON"
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise InputError("HF328", f"--context: {text!r} is no whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="elastic_trainer.checkpoint.convert", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="export|import")

    export = commands.add_parser("export", help="checkpoint -> Hugging Face safetensors")
    export.add_argument("--checkpoints", type=Path, required=True, help="the checkpoint directory")
    export.add_argument("--dir", required=True, help="name of one checkpoint in it")
    export.add_argument("--manifest-sha256", required=True, help="as the board has it")
    export.add_argument("--model-shape", type=_shape, required=True, help="JSON of a ModelShape")
    export.add_argument("--out", type=Path, required=True, help="directory to make")
    export.add_argument("--dtype", choices=list(DTYPES), default="float32")
    export.add_argument("--tokenizer", type=Path, help="a tokenizer.json to copy")
    export.add_argument("--context", type=_positive, help="max_position_embeddings, tokens")
    export.set_defaults(run=_export)

    bring = commands.add_parser("import", help="Hugging Face safetensors -> a run at step 0")
    bring.add_argument("--hf", type=Path, required=True, help="directory with config.json")
    bring.add_argument("--run", type=Path, required=True, dest="run_dir", help="new or empty")
    bring.add_argument("--run-id", help="goes into the manifest; made up when left out")
    bring.set_defaults(run=_import)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Conversions of checkpoints: a child process that has torch, which the launcher has not."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.plan.models import raw_of
from launcher.platforms.installed import need
from launcher.runs.checkpoints.commits import Commit, RunCheckpoints
from launcher.spec.codes import CODES
from launcher.spec.errors import PermanentError, UserError

_WRONG_INPUT = 2


def export_request(found: RunCheckpoints, commit: Commit, out: Path, dtype: str) -> dict[str, Any]:
    """Return what the converter is asked to export `commit` to the folder `out`.

    Raises:
        UserError: HF631 its manifest is damaged; HF613 its model is unknown.
    """
    config = found.config
    shape = found.manifest(commit).model or (config.model if config else None)
    if shape is None:
        raise UserError(
            "HF613",
            f"{found.run} does not say of which model its weights are: neither its job.json nor "
            "the checkpoint's manifest has the dimensions; save it again with this version",
        )
    request: dict[str, Any] = {
        "checkpoints": str(found.storage.root),
        "commit": dataclasses.asdict(commit),
        "model": raw_of(shape),
        "out": str(out),
        "dtype": dtype,
    }
    if config is not None:
        request |= {"context": config.train.seq_len, "code": config.command_dir}
        if config.data.tokenizer != "bytes" and missing_tokenizer(found) is None:
            request["tokenizer"] = config.data.tokenizer
    return request


def missing_tokenizer(found: RunCheckpoints) -> str | None:
    """Return the run's tokenizer if it is not there any more: weights go without it."""
    name = found.config.data.tokenizer if found.config else "bytes"
    return name if name != "bytes" and not Path(name).is_file() else None


def run_converter(
    what: str, request: Mapping[str, Any], *, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Run `elastic_trainer.state.convert` and return its result.

    An interrupt reaches the child as well; it leaves nothing half done.

    Args:
        what: `export` or `import`.
        request: the arguments, as `elastic_trainer.state.convert` has them.
        on_progress: called with bytes done and bytes in all.

    Raises:
        UserError: HF632, torch or safetensors is missing; or what the child said of
            the user's input, with its code.
        PermanentError: the child failed; its words.
    """
    need(f"holdfast checkpoint {what}", "torch", "safetensors", extra="train")
    module = "elastic_trainer.state.convert"
    command = [sys.executable, "-m", module, what, json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8"
        ) as child,
    ):
        try:
            result = _follow(child, on_progress)
            code = child.wait()
        except BaseException:
            # Ctrl-C was sent to the child too: let it remove what it has begun.
            child.terminate()
            child.wait()
            raise
        complaints.seek(0)
        said = complaints.read().strip()
    if code == 0 and result is not None:
        return result
    last = said.splitlines()[-1] if said else ""
    error_code, _, message = last.partition(" ")
    if code == _WRONG_INPUT and error_code in CODES:
        raise UserError(error_code, message)
    if code == -signal.SIGKILL:
        last = "it was killed by the system, most likely for want of memory; use a larger machine"
    raise PermanentError(f"{what} failed: {last or f'exit code {code}'}")


def _follow(
    child: subprocess.Popen[str], on_progress: Callable[[int, int], None]
) -> dict[str, Any] | None:
    assert child.stdout is not None
    result: dict[str, Any] | None = None
    for line in child.stdout:
        if not line.startswith("{"):
            continue  # a library's remark
        message = json.loads(line)
        if "result" in message:
            result = message["result"]
        else:
            on_progress(message["done_bytes"], message["total_bytes"])
    return result

"""`holdfast rehearse`: the job undisturbed, then once for each failure, as `holdfast run` runs it.

Each run is a process and has a run directory below one folder. For a full disk the run directory is
a small file system that only that run sees (unshare(1), tmpfs).

What can break stays, what only costs shrinks (`scaled`). The command and its environment stay, and
precision, recomputation, the kinds of parallelism as far as MOST_WORKERS processes go, whether a
smaller layout exists, and the limits of `elastic`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.models import Plugin, Transformers, raw_of
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.failures import EXIT_DONE, EXIT_FAILED
from launcher.local.verdicts import (
    Attempts,
    Failing,
    Level,
    Rehearsed,
    RowVerdict,
    clocked,
    faults_of,
    sets_of,
    verdict,
)
from launcher.plan.clock import clock_chain, predicted_save_s
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.local import SMALL_DISK_BYTES, python_path
from launcher.record.files import RunRecord
from launcher.spec.errors import UserError
from launcher.spec.spec import JobSpec

MOST_WORKERS: Final = 8
MOST_NODES: Final = 4
STEPS: Final = 40
CORPUS: Final = "corpus.txt"
"""In the rehearsal's folder: what a trainer reads whose own corpus is not for this machine."""
_SEQ_LEN: Final = 64
_LONGEST_S: Final = {"hang_ceiling_s": 60.0, "start_ceiling_s": 120.0, "join_timeout_s": 30.0}
"""Limits of `elastic` that a rehearsal would only wait for."""
_FULL_DISK: Final = """\
trap : INT TERM
mount -t tmpfs -o size="$1",mode=0700 none "$2" || exit 125
kept=$3; run=$2; shift 3
"$@"
code=$?
rm -f "$run/.filler"
for part in events logs board ledger job.json job.rendered.json job.yaml summary.json; do
    [ ! -e "$run/$part" ] || cp -R "$run/$part" "$kept/$part"
done
exit $code
"""
"""Arguments: bytes, run directory, where what `holdfast why` reads of it is kept, command."""
_OWN_MOUNTS: Final = ("unshare", "--user", "--map-root-user", "--mount", "--")
_LEAST_DISK: Final = 64 << 20
_DISK_FACTOR: Final = 4
"""Times what the undisturbed run has written: kept checkpoints, and one more being written."""
_SAID_CHARS: Final = 600
_END_S: Final = 60.0
"""For a run that was interrupted to save and end."""


class Interrupted(Exception):  # noqa: N818  the user's wish, no error
    """Ctrl-C or SIGTERM; the run under way has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    summary: dict[str, Any] | None
    """None: it did not get that far."""
    said: str
    """Why not, or the end of what it wrote on stderr."""

    @property
    def code(self) -> int:
        """The job's exit code."""
        return EXIT_FAILED if self.summary is None else int(self.summary["code"])


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """Rehearses one job.

    Args:
        job: its file.
        spec: the same, read; of its own size.
        sets: `--set`s that make it small (`scaled`), then the user's.
        folder: for the runs; must not exist.
        timeout_s: longest time of one run.
        say: called with progress.
    """

    job: Path
    spec: JobSpec
    sets: Sequence[str]
    folder: Path
    timeout_s: float
    say: Callable[[str], None] = lambda _: None
    mono: Callable[[], float] = time.monotonic
    _running: subprocess.Popen[str] | None = field(default=None, init=False)
    _asked_to_end: bool = field(default=False, init=False)

    def run(self, only: Sequence[Failing]) -> list[RowVerdict]:
        """Return the verdicts, in order.

        Raises:
            UserError: HF698 the job does not even run undisturbed; as `holdfast run`.
            Interrupted: the user wants the end.
        """
        small = load_spec(self.job, self.sets)
        self._make_folder()
        if small.device != self.spec.device or small.full_layout != self.spec.full_layout:
            self.say(f"scaled down: {_size(self.spec)} -> {_size(small)}; --json has every change")
        stage = self._undisturbed(small)
        found = []
        for failing in only:
            row = self._not_here(failing, stage) or self._rehearse(failing, stage)
            self.say(f"{row.failing}: {row.level}: {row.text}")
            found.append(row)
        return found

    def interrupt(self, *_: object) -> None:
        """Ask for the end; fits `signal.signal`."""
        self._asked_to_end = True
        if self._running is not None:
            _interrupt(self._running)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            (self.folder / CORPUS).write_text("".join(f"{n} is {n:b}\n" for n in range(20_000)))
        except OSError as error:
            raise UserError(
                "HF612", f"{self.folder} cannot be made: {error.strerror or error}; use --folder"
            ) from error

    def _undisturbed(self, small: JobSpec) -> Rehearsed:
        self.say("undisturbed: running")
        begun = self.mono()
        ended = self._hold("undisturbed", ())
        if ended.code != EXIT_DONE or ended.summary is None:
            raise UserError(
                "HF698",
                f"undisturbed and scaled down to this machine the job fails: {ended.said}; see "
                f"holdfast why {self.folder / 'undisturbed'}, or change the job by --set",
            )
        ladder = plan(small).ladder
        steps = ended.summary["steps"]
        self.say(f"undisturbed: {steps} steps in {self.mono() - begun:.0f} s")
        return Rehearsed(
            summary=ended.summary,
            nodes=ladder.max_nodes,
            smallest=ladder.min_nodes,
            is_script=small.command is not None,
        )

    def _not_here(self, failing: Failing, stage: Rehearsed) -> RowVerdict | None:
        """Return the row of what this machine or this job has no way to show; None: it has."""
        why = ""
        if failing is Failing.SLOW and stage.is_script:
            why = "a script's ranks are not compared"
        elif failing is Failing.DISK:
            if self._disk_bytes() > SMALL_DISK_BYTES:
                why = f"it writes more than {SMALL_DISK_BYTES >> 30} GiB"
            elif not _may_mount(self.folder):
                why = "no mounts of its own are allowed (unshare --user --mount)"
        return RowVerdict(failing=failing, level=Level.NOT_HERE, text=why) if why else None

    def _rehearse(self, failing: Failing, stage: Rehearsed) -> RowVerdict:
        faults = faults_of(failing, stage)
        self.say(f"{failing}: running with {' '.join(faults)}")
        words = [word for fault in faults for word in ("--fault", fault)]
        words += [word for text in sets_of(failing, stage) for word in ("--set", text)]
        ended = self._hold(failing, words, disk=failing is Failing.DISK)
        codes = [ended.code]
        if failing is Failing.PREEMPTION and ended.summary is not None and ended.code != EXIT_DONE:
            ended = self._hold(failing, (), resume=True)
            codes.append(ended.code)
        if ended.summary is None:
            return RowVerdict(failing=failing, level=Level.FAIL, text=ended.said, faults=faults)
        events = RunRecord(self.folder / failing).poll()
        found = Attempts(codes=codes, summary=ended.summary, events=events)
        row = verdict(failing, stage, found, faults)
        return self._clocked(row) if failing is Failing.PREEMPTION else row

    def _clocked(self, row: RowVerdict) -> RowVerdict:
        """Hold the job's own clock chain against its own size."""
        ladder = plan(self.spec).ladder
        try:
            clock = clock_chain(self.spec, ladder)
        except UserError as error:
            text = f"{row.text}; {error.code} {error.message}"
            return RowVerdict(failing=row.failing, level=Level.FAIL, text=text, faults=row.faults)
        predicted_s = predicted_save_s(self.spec, ladder)
        return clocked(row, clock, predicted_s, is_script=self.spec.command is not None)

    # -- running -----------------------------------------------------------------------------

    def _hold(
        self, name: str, words: Sequence[str], *, resume: bool = False, disk: bool = False
    ) -> _Ended:
        run_dir = self.folder / name
        argv = [sys.executable, "-P", "-m", "launcher.cli.main", "run", "--json", "--quiet"]
        if resume:
            argv += ["--resume", str(run_dir)]
        else:
            argv += [*(word for text in self.sets for word in ("--set", text)), *words]
            argv += ["--run-dir", str(run_dir), str(self.job)]
        if disk:
            mount = self.folder / "small-disk"
            mount.mkdir()
            run_dir.mkdir()
            argv[argv.index(str(run_dir))] = str(mount)
            size = str(self._disk_bytes())
            shell = ("sh", "-c", _FULL_DISK, "holdfast-rehearse", size, str(mount), str(run_dir))
            argv = [*_OWN_MOUNTS, *shell, *argv]
        return self._wait(argv, self.folder / f"{name}.err")

    def _wait(self, argv: Sequence[str], errors: Path) -> _Ended:
        if self._asked_to_end:
            raise Interrupted
        with errors.open("w+", encoding="utf-8") as said:
            self._running = process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,  # Ctrl-C is for this process alone, which passes it on
            )
            timed_out = False
            try:
                out, _ = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                timed_out, out = True, ""
                _end(process)
            finally:
                self._running = None
            said.seek(0)
            text = said.read().strip()
        if self._asked_to_end:
            raise Interrupted
        if timed_out:
            return _Ended(summary=None, said=f"no end within {self.timeout_s:g} s (--timeout)")
        return _read(out, text)

    def _disk_bytes(self) -> int:
        files = (path for path in (self.folder / "undisturbed").rglob("*") if path.is_file())
        return max(_LEAST_DISK, _DISK_FACTOR * sum(path.stat().st_size for path in files))


def _size(spec: JobSpec) -> str:
    return f"{spec.full_layout} on {counted(spec.cluster.nodes, 'node')} of {spec.cluster.gpu}"


def _read(out: str, said: str) -> _Ended:
    """Return what `holdfast run --json` has printed."""
    try:
        found = json.loads(out)
    except ValueError:
        return _Ended(summary=None, said=said[-_SAID_CHARS:] or "it printed nothing")
    if "code" not in found:
        problems = (f"{each['code']} {each['message']}" for each in found["problems"])
        return _Ended(summary=None, said="; ".join(problems))
    return _Ended(summary=found, said=said[-_SAID_CHARS:])


def _interrupt(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # agents have sessions of their own


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a run twice, which kills what is left of it."""
    for _ in range(2):
        _interrupt(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
            return
    process.kill()
    process.communicate()


def _may_mount(folder: Path) -> bool:
    """Whether a process of ours may have mounts of its own."""
    mount = folder / "mount"
    mount.mkdir(exist_ok=True)
    argv = [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "-o", "size=4k", "none", str(mount)]
    if shutil.which(argv[0]) is None:
        return False
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


# -- the job, small -----------------------------------------------------------------------


def scaled(spec: JobSpec, corpus: Path) -> tuple[str, ...]:
    """Return the `--set`s with which `spec` runs on emulated nodes of one machine.

    Args:
        spec: a checked job; one for CPUs that is small already is hardly changed.
        corpus: a text for a trainer whose job is shrunk.
    """
    return tuple(f"{key}={json.dumps(value)}" for key, value in _sets(spec, corpus))


def _sets(spec: JobSpec, corpus: Path) -> Iterator[tuple[str, Any]]:
    if spec.checkpoint.dir is not None:
        yield "checkpoint.dir", None  # the job's own is not for rehearsals
    for key, longest in _LONGEST_S.items():
        if getattr(spec.elastic, key) > longest:
            yield f"elastic.{key}", longest
    if spec.device == "cpu" and spec.cluster.nodes * spec.cluster.gpus_per_node <= MOST_WORKERS:
        return
    yield from _machines(spec)
    if spec.command is None:
        yield from _training(spec, corpus)


def _machines(spec: JobSpec) -> Iterator[tuple[str, Any]]:
    """Yield a layout of MOST_WORKERS at most, and nodes for it.

    Axes keep two ranks each, in the order tp, pp, cp, as long as two replicas have room: what a
    lost node leaves is a replica less.
    """
    want = spec.layout
    replica, axes = 1, {}
    for axis in ("tp", "pp", "cp"):
        axes[axis] = 2 if getattr(want, axis) > 1 and 2 * replica * 2 <= MOST_WORKERS else 1
        replica *= axes[axis]
    dp = 1 if spec.dp == 1 else min(MOST_WORKERS // replica, MOST_NODES)
    nodes = min(MOST_NODES, dp * replica // axes["tp"])
    copies = 2 if want.dp_replicate > 1 and dp >= 2 else 1
    interleave = 2 if axes["pp"] > 1 and want.interleave > 1 else 1
    schedule = want.schedule if axes["pp"] > 1 else "1f1b"
    yield "cluster.gpu", "cpu"
    yield "cluster.nodes", nodes
    yield "cluster.gpus_per_node", dp * replica // nodes
    yield "cluster.spares", 0
    yield (
        "layout",
        {
            **axes,
            "dp": "auto",
            "dp_replicate": copies,
            "ep": 2 if want.ep > 1 and dp // copies >= 2 else 1,
            "order": want.order,
            "schedule": schedule,
            "interleave": interleave,
        },
    )
    ladder = plan(spec).ladder
    yield "elastic.sizes", None
    yield "elastic.min_nodes", 1 if ladder.min_nodes < ladder.max_nodes else nodes
    for section, value in (("slurm", spec.slurm_section), ("kubernetes", spec.kubernetes_section)):
        if value is not None:
            yield section, None  # their counts are of the real nodes


def _training(spec: JobSpec, corpus: Path) -> Iterator[tuple[str, Any]]:
    # Of a user's class nobody knows what may shrink; a small Llama stands for transformers' own.
    if not isinstance(spec.shape, Plugin):
        yield "model", _model(spec)
    yield "train.seq_len", _SEQ_LEN
    yield "train.global_batch", MOST_WORKERS
    yield "train.micro_batch", 1
    yield "train.steps", STEPS
    yield "train.compile", False
    yield "train.float8", False
    if spec.train.lora is not None:
        yield "train.lora", None
    yield "train.optimizer.warmup_steps", STEPS // 4
    yield "data", {"path": str(corpus), "format": "text", "tokenizer": "bytes"}
    if spec.validation is not None:
        yield "validation", None
    yield "checkpoint.every_s", None
    yield "checkpoint.every_steps", STEPS // 8


def _model(spec: JobSpec) -> dict[str, Any]:
    stages = max(2, 2 * spec.layout.interleave if spec.layout.pp > 1 else 2)
    kv_heads = 2 if spec.shape.num_kv_heads < spec.shape.num_heads else 4
    small = {
        "num_layers": min(4, stages),
        "dim": 32,
        "num_heads": 4,
        "num_kv_heads": kv_heads,
        "ffn_dim": 64,
        "vocab_size": 256,
        "head_dim": None,
    }
    raw = raw_of(spec.shape)
    for key, most in (("num_experts", 4), ("experts_per_token", 2), ("sliding_window", 32)):
        if raw.get(key):
            small[key] = min(raw[key], most)
    own = (
        "family",
        "attention_bias",
        "norm_topk_prob",
        "layer_types",
        "norm_eps",
        "rope_theta",
    )
    kept = ("tie_embeddings", *(() if isinstance(spec.shape, Transformers) else own))
    return {**{key: raw[key] for key in kept if key in raw}, **small}

"""Writes one file of each format with this version's writers, and beside them what they say.

`python tests/formats/format_writers.py` makes the folder of the version in pyproject.toml. What is
there stays as it is: runs of that version have files like these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tomllib
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.kubernetes_board import ApiReply, KubernetesBoard
from elastic_trainer.board.state import BoardState, Lineage, Origin, update
from elastic_trainer.data.corpus import pin
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import FAMILIES, ModelShape, Plugin
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import EVENTS, Event
from elastic_trainer.record.sample_ledger import SampleAudit
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.manifest import MANIFEST_NAME
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.snapshots import image as images
from elastic_trainer.state.state import TrainingState
from elastic_trainer.storage.files import write_json
from elastic_trainer.storage.typed import Unix
from elastic_trainer.train.feed import SampleLedger
from elastic_trainer.worker.rank_grid import RankGrid
from launcher.fleet.node_ledger import NodeLedger
from launcher.fleet.rules import Entry, Verdict
from launcher.node.attempt import Attempt, Past
from launcher.node.batch import note_begin, note_end
from launcher.node.decide import AttemptOutcome
from launcher.platforms.base import JobId, JobRef
from launcher.record import stop_request
from launcher.runs.runs import SUBMITTED, Submission

FOLDER: Final = Path(__file__).parent
T_UNIX: Final = 1_795_000_000.0
KEY: Final = bytes(range(32))
"""Of images."""
CORPUS: Final = {"format": "text", "tokens": 20_000, "tokenizer": "bytes"}


def current_version() -> str:
    text = (FOLDER.parents[1] / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]["version"]


def filled(want: Any, **known: Any) -> Any:
    """Return a dataclass with all fields set: no two are the same, and none is a default."""
    return _filled(want, itertools.count(1), known)


def _filled(want: Any, numbers: Iterator[int], known: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(want):
        hints = typing.get_type_hints(want, include_extras=True)
        made = {}
        for each in dataclasses.fields(want):
            made[each.name] = (
                each.default
                if each.name == "version"
                else known[each.name]
                if each.name in known
                else not each.default
                if hints[each.name] is bool
                else _filled(hints[each.name], numbers, {})
            )
        return want(**made)
    if args := typing.get_args(want):
        if want == Unix:
            return T_UNIX + next(numbers)
        origin = typing.get_origin(want)
        if origin in (types.UnionType, typing.Union):
            return _filled(args[0], numbers, {})
        inner = [_filled(arg, numbers, {}) for arg in args if arg is not ...]
        return tuple(inner) if origin is tuple else {inner[0]: inner[1]}
    number = next(numbers)
    return {int: number, float: number + 0.25, str: f"text {number}", bool: True}[want]


def defaults(want: Any, **known: Any) -> Any:
    """Return a dataclass in which only what has no default is set."""
    full = filled(want, **known)
    must = (
        each.name
        for each in dataclasses.fields(want)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    )
    return want(**{name: getattr(full, name) for name in must})


SHAPE: Final = ModelShape(num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8)
SMALL: Final = Ladder((Rung(num_nodes=1, layout=ParallelLayout(), micro_batches=1),))
ORDER: Final = ("dp", "tp", "cp", "pp")
LADDER: Final = Ladder(
    tuple(
        Rung(
            num_nodes=8 - n,
            layout=layout,
            micro_batches=6 + n,
            tokens_per_s=1000.0 - n,
            memory_gib=40.5 + n,
            no_sync=n > 1,
        )
        for n, layout in enumerate(
            [
                ParallelLayout(dp=4, tp=2, pp=2, dp_replicate=2, ep=2, order=ORDER),
                ParallelLayout(dp=3, tp=2, pp=2, order=ORDER),
                ParallelLayout(dp=2, cp=2),
            ]
        )
    )
)
SECTIONS: Final = {
    "train": defaults(TrainSection),
    "data": defaults(DataSection),
    "checkpoint": defaults(CheckpointSection),
    "elastic": ElasticSection(),
}


def jobs() -> dict[str, TrainConfig]:
    """Return one with every field set, one of defaults, and one for each family of models."""
    bare = defaults(TrainConfig, model=SHAPE, ladder=SMALL, **SECTIONS)
    families = {name: replace(bare, model=filled(kind)) for name, kind in FAMILIES.items()}
    full = filled(TrainConfig, model=filled(Plugin), ladder=LADDER)
    return {"full": full, "bare": bare, **families}


def events() -> list[Event]:
    """Return one event of each name, with all of its fields."""
    found = []
    for number, (name, said) in enumerate(EVENTS.items()):
        fields = [each for each in said.rpartition(". ")[2].split(", ") if each.isidentifier()]
        about = {"node": f"n{number}", "rank": number, "epoch": number + 1, "step": number + 2}
        values = {name: f"{name} {number}" for name in fields}
        found.append(
            Event(event=name, t_unix=T_UNIX + number, t_mono=number + 0.5, fields=values, **about)
        )
    return found


def story() -> list[Event]:
    """Return the record of a run that loses a node, and redoes a step."""
    formed = {"spares": [], "layout": "dp1", "coordinator": "n0", "reason": "start"}
    done = {"grad_norm": 1.0, "tokens": 8, "step_s": 0.5, "lr": 0.1}
    gone = {"member": "n1", "host": "h1", "reason": "EOF"}
    begun = {"layout": "dp1", "restored_from": None}
    lines: list[tuple[str, int | None, int | None, dict[str, Any]]] = [
        ("run.started", None, None, {"attempt": 1, "nodes": 2}),
        ("epoch.formed", 1, None, {**formed, "members": ["n0", "n1"], "rung": 2}),
        ("trainer.started", 1, 0, {**begun, "resume_step": 0}),
        ("step.completed", 1, 1, {**done, "loss": 3.5}),
        ("step.completed", 1, 2, {**done, "loss": 2.5}),
        ("step.committed", 1, 1, {"source": "memory"}),
        ("member.lost", 1, None, {**gone, "detected_s": 0.1}),
        ("member.evicted", 1, None, {**gone, "kind": "node_fault"}),
        ("epoch.formed", 2, None, {**formed, "members": ["n0"], "rung": 1}),
        ("trainer.started", 2, 1, {**begun, "resume_step": 1}),
        ("step.completed", 2, 2, {**done, "loss": 2.25}),
        ("step.completed", 2, 3, {**done, "loss": 1.5}),
        ("checkpoint.committed", 2, 3, {"dir": "d", "manifest_sha256": "0" * 64}),
        ("run.ended", None, None, {"code": 0, "reason": "done"}),
    ]
    return [
        Event(
            event=name,
            t_unix=T_UNIX + number,
            t_mono=number,
            node="n0",
            rank=0 if name.startswith(("step", "trainer")) else None,
            epoch=epoch,
            step=step,
            fields=fields,
        )
        for number, (name, epoch, step, fields) in enumerate(lines)
    ]


SUMMARY: Final = {
    "steps": 3,
    "steps_redone": 1,
    "restarts": 1,
    "attempts": 1,
    "tokens": 24,
    "final_loss": 1.5,
    "nodes_at_end": ["n0"],
    "checkpoints_committed": [3],
    "code": 0,
    "excluded": [{"host": "h1"}],
    "failures": [{"kind": "node_lost", "node": "n1"}],
    "wall_s": 13.0,
}
BOARD: Final = filled(
    BoardState, epoch=3, lineage=Lineage((Origin(1, 0, 0), Origin(3, 1, 2))), finished=False
)
MACHINE: Final = filled(
    Entry, t_unix=T_UNIX, verdict=Verdict.OUT, until_unix=T_UNIX + 9, releases=(), operator=False
)
RELEASE: Final = filled(
    Entry, t_unix=T_UNIX + 1, verdict=Verdict.RELEASE, releases=(MACHINE.name,), operator=True
)
ATTEMPT: Final = ("17", 3)
PAST: Final = Past(
    name="17.3", begun_unix=T_UNIX, step=2, code=92, failed=True, reason="too few", began=False
)
SUBMISSION: Final = filled(
    Submission, job=JobRef(id=JobId("17"), submit_time=T_UNIX, run_dir="/runs/t", cluster="c")
)
PAYLOAD: Final = bytes(range(200))
PARTS: Final = (
    images.Part("model.a", "uint8", (60, 2), (10, 0), (50, 2), 0, 100),
    images.Part("model.b", "float32", (18,), (0,), (18,), 128, 72),
)
HEADER: Final = images.Header(
    epoch=2,
    step=7,
    rank=1,
    shard=3,
    num_shards=4,
    num_ranks=8,
    index_bytes=len(images.encode_index(PARTS)),
    payload_bytes=len(PAYLOAD),
)
AUDIT: Final = SampleAudit(steps=3, lost=0, repeated=0, steps_redone=1)


class Ranks:
    """A group of one, whose model has one step behind it."""

    def __init__(self, run: Path, log: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager(
            CheckpointPolicy(
                run_id="t-1",
                epoch=BOARD.epoch,
                section=CheckpointSection(dir=str(run / "checkpoints"), every_s=None),
                ceiling_s=20.0,
                layout="dp1-pp1-cp1-tp1",
                global_batch=4,
                model=SHAPE,
            ),
            FileBoard(run / "board", heal_s=0.0),
            EventLog(log, "worker-0"),
            torch.device("cpu"),
            ranks=RankGrid(timedelta(seconds=20)),
            state=TrainingState(self.model, (self.optimizer,)),
        )

    def step(self) -> None:
        self.model(torch.ones(2, 3)).square().sum().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, Any]:
        """Return weights and moments as lists."""
        moments = {
            f"{name}.{key}": value
            for name, each in self.model.named_parameters()
            for key, value in self.optimizer.state[each].items()
        }
        return {name: t.tolist() for name, t in {**self.model.state_dict(), **moments}.items()}


@contextmanager
def group_of_one() -> Iterator[Path]:
    """Yield a folder for logs."""
    with TemporaryDirectory() as made:
        dist.init_process_group("gloo", init_method=f"file://{made}/store", rank=0, world_size=1)
        yield Path(made)
        dist.destroy_process_group()


class ConfigMap:
    """An API server with one ConfigMap, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        if body is not None:
            found = {**body, "metadata": {**body["metadata"], "resourceVersion": "7"}}
            self._file.write_text(json.dumps(found, indent=1) + "\n")
        elif not self._file.exists():
            return ApiReply(404, {})
        return ApiReply(200, json.loads(self._file.read_text()))


def config_map(file: Path) -> KubernetesBoard:
    return KubernetesBoard(ConfigMap(file), "train", "t-board", number=lambda: "1")


def write(folder: Path) -> None:
    """Write everything into a new folder; `expected.json` has what it says."""
    run = folder / "run"
    run.mkdir(parents=True)
    for name, job in jobs().items():
        (folder / f"job-{name}.json").write_text(job.to_json())
    (run / "events").mkdir()
    (run / "events" / "all.jsonl").write_text("".join(each.encode() for each in events()))
    (folder / "story" / "events").mkdir(parents=True)
    told = "".join(each.encode() for each in story())
    (folder / "story" / "events" / "all.jsonl").write_text(told)
    _small_files(run)
    FileBoard(folder / "board").set_state(BOARD.encode())
    config_map(folder / "board-config-map.json").set_state(BOARD.encode())
    manifest, tensors = _checkpoint(run)
    _fleets(folder)
    with mock.patch.object(images, "_OPENSSL", None):
        _image(folder / "image-blake2b")
    _image(folder / "image-gmac")
    said = {
        "jobs": {name: asdict(job) for name, job in jobs().items()},
        "events": [asdict(each) for each in events()],
        "board": asdict(BOARD),
        "manifest": manifest,
        "checkpoint": tensors,
        "image": {**asdict(HEADER), "parts": [part._asdict() for part in PARTS]},
        "payload_crc32": zlib.crc32(PAYLOAD),
        "fleet": [asdict(MACHINE), asdict(RELEASE)],
        "summary": SUMMARY,
        "samples": asdict(AUDIT),
        "attempt": asdict(PAST),
        "submission": asdict(SUBMISSION),
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in said.items())
    (folder / "expected.json").write_text("{{\n{}\n}}\n".format(",\n".join(lines)))


def _small_files(run: Path) -> None:
    """Write what a launcher, its ledger and its attempts leave in a run."""
    stop_request.ask(run, why="cancel", t_unix=T_UNIX)
    pin(run / "corpus.json", CORPUS, where="/data/text.txt")
    write_json(run / SUBMITTED, {**SUBMISSION.to_json(), "former": []})
    for epoch, resume_step, steps in ((1, 0, (1, 2)), (2, 1, (2, 3))):
        ledger = SampleLedger(run, epoch=epoch, dp_rank=0, resume_step=resume_step, layout="dp1")
        for step in steps:
            ledger.fed(range(4 * step - 4, 4 * step))
            ledger.end_step(step)
        ledger.close()
    attempt = Attempt(run, *ATTEMPT)
    state = replace(BOARD, commits=(replace(BOARD.commits[0], step=PAST.step),))
    with mock.patch("time.time", return_value=T_UNIX), mock.patch("launcher.node.batch.note"):
        note_begin(attempt, jobs()["bare"], state, {"nodes": "n[0-3]"})
        outcome = AttemptOutcome(code=PAST.code, failed=PAST.failed, reason=PAST.reason)
        note_end(attempt, outcome, began=PAST.began)


def _checkpoint(run: Path) -> tuple[dict[str, Any], Any]:
    """Save one; return what its manifest says, and its tensors."""
    update(FileBoard(run / "board"), lambda _: BoardState(epoch=BOARD.epoch))
    with group_of_one() as log:
        ranks = Ranks(run, log)
        ranks.step()
        assert ranks.manager.save(2, wait=True)
        ranks.manager.close()
    (saved,) = (run / "checkpoints").iterdir()
    manifest = {
        "run_id": "t-1",
        "epoch": 3,
        "step": 2,
        "consumed_samples": 8,
        "world_size": 1,
        "layout": "dp1-pp1-cp1-tp1",
        "model": asdict(SHAPE),
        "files": {
            each.name: {
                "size_bytes": each.stat().st_size,
                "sha256": hashlib.sha256(each.read_bytes()).hexdigest(),
            }
            for each in saved.iterdir()
            if each.name != MANIFEST_NAME
        },
    }
    return manifest, ranks.tensors()


def _fleets(folder: Path) -> None:
    fleets = {
        "fleet": NodeLedger(folder / "fleet", wall=lambda: T_UNIX + 9),
        "config map": NodeLedger(
            config_map(folder / "fleet-config-map.json"),
            config_map(folder / "fleet-config-map-operators.json"),
            wall=lambda: T_UNIX + 9,
        ),
    }
    for fleet in fleets.values():
        fleet.add(MACHINE)
        fleet.say([RELEASE], must=True)


def _image(path: Path) -> None:
    image = images.Image(path, create_bytes=HEADER.total_bytes)
    image.map[images.PAGE : images.PAGE + HEADER.index_bytes] = images.encode_index(PARTS)
    image.map[HEADER.payload_at : HEADER.total_bytes] = PAYLOAD
    image.seal(HEADER, KEY)
    image.commit()
    image.close()


if __name__ == "__main__":
    write(FOLDER / current_version())

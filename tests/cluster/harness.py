"""Trainers without agents: real workers over gloo, forked from one warm server.

The test takes the agent's part: it writes job.json, publishes the epoch on the board, hosts
the store, sets the workers' environment, asks for stops through their heartbeats, and reaps.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import number_faults
import torch.distributed as dist
from tiny_run import event_files
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Commit, update
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    NumbersSection,
    OptimizerConfig,
    TrainConfig,
    TrainSection,
    ValidationSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.record.events import Event
from elastic_trainer.record.sample_ledger import SampleAudit, audit
from elastic_trainer.train import main as train
from elastic_trainer.worker import rank_grid
from elastic_trainer.worker.heartbeat import Beat, Heartbeat, Request
from elastic_trainer.worker.worker_answers import forget_answers

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["elastic_trainer.train.main"])
DEADLINE_S = 50.0
MAX_GROUP = "TEST_MAX_GROUP"
PREPARED = "TEST_PREPARED"

SHAPE = ModelShape(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=256)
TEXT = "".join(f"{i} squared is {i * i}, cubed {i**3}; " for i in range(600))


def make_config(
    run: Path,
    *layouts: ParallelLayout,
    checkpoint: Mapping[str, Any] | None = None,
    model: ModelShape = SHAPE,
    optimizer: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    numbers: Mapping[str, Any] | None = None,
    validation: Mapping[str, Any] | None = None,
    interleave: int = 1,
    device: str = "cpu",
    **sections: Any,
) -> TrainConfig:
    """Return the job of one worker a node that may run in `layouts`; `sections` is of `train`."""
    defaults = {"seq_len": 16, "global_batch": 12, "micro_batch": 1, "steps": 10, "seed": 7}
    values = {**defaults, "precision": "fp32", "recompute": "none", **sections}
    adam = OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 2, **(optimizer or {})})
    rungs = [
        Rung(
            num_nodes=layout.world_size,
            layout=layout,
            micro_batches=rounds(
                values["global_batch"] // values["micro_batch"], layout, interleave
            ),
            no_sync=bool(values.get("no_sync")),
        )
        for layout in sorted(layouts, key=lambda layout: -layout.world_size)
    ]
    return TrainConfig(
        name="t",
        run_id="run-1",
        model_name="tiny",
        model=model,
        ladder=Ladder(tuple(rungs)),
        gpus_per_node=1,
        device=device,
        train=TrainSection(**values, optimizer=adam),
        data=DataSection(**{"path": str(run / "text.txt"), **(data or {})}),
        checkpoint=CheckpointSection(
            dir=str(run / "checkpoints"), **{"every_s": None, **(checkpoint or {})}
        ),
        elastic=ElasticSection(start_ceiling_s=40.0),
        numbers=NumbersSection(**(numbers or {})),
        validation=ValidationSection(**validation) if validation else None,
        schedule="interleaved" if interleave > 1 else "1f1b",
        interleave=interleave,
    )


def rounds(num_micro_batches: int, layout: ParallelLayout, interleave: int) -> int:
    """Return the micro-batches per dp rank, as the launcher plans them."""
    number = micro_batches_per_rank(num_micro_batches, layout.dp)
    if layout.pp > 1:
        number = max(number, layout.pp)
        while interleave > 1 and number % (number // layout.pp):
            number += 1
    return number


@dataclass
class Group:
    """The workers of one epoch."""

    run: Path
    epoch: int
    store: dist.TCPStore
    environments: list[dict[str, str]]
    """By rank."""
    workers: list[ForkServerProcess] = field(default_factory=list)

    def ask(self, rank: int, request: Request) -> None:
        """Put `request` into the heartbeat of `rank`, as its agent does."""
        beat = Heartbeat(heartbeat_path(self.run, rank))
        beat.ask(request)
        beat.close()

    def beat(self, rank: int) -> Beat:
        """Read the heartbeat of `rank`."""
        beat = Heartbeat(heartbeat_path(self.run, rank))
        try:
            return beat.read()
        finally:
            beat.close()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll `condition` while the workers live."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s\n{self.logs()}"
            assert all(w.is_alive() for w in self.workers), f"{what}: ended\n{self.logs()}"
            time.sleep(0.002)

    def wait(self) -> list[int | None]:
        """Return the exit codes by rank; at most `DEADLINE_S` after the call."""
        deadline = time.monotonic() + DEADLINE_S
        left = {worker.sentinel for worker in self.workers}
        while left:
            ended = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            assert ended, f"workers still running after {DEADLINE_S} s\n{self.logs()}"
            left.difference_update(ended)
        for worker in self.workers:
            worker.join()
        for rank in range(len(self.environments)):
            forget_answers(heartbeat_path(self.run, rank))  # as agents do
        return [worker.exitcode for worker in self.workers]

    def logs(self) -> str:
        """Return what the workers printed."""
        paths = sorted((self.run / "logs").glob(f"e{self.epoch}-*"))
        return "\n".join(f"{path.name}: {path.read_text()}" for path in paths)


class Run:
    """A run directory and the epochs on it."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self.path, self.config = path, config
        self.max_group = rank_grid.MAX_GROUP
        """Ranks of a group that all connect: with two, eight workers are what thousands are."""
        self.number_faults = ""
        """What happens to the workers' numbers, as `nan@5`: see number_faults.py."""
        self.prepared = ""
        """Who is made ready before its epoch begins: `all`, or the last rank, which is `urgent`."""
        for name in ("events", "ledger", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)
        if config.data.path == str(path / "text.txt"):
            (path / "text.txt").write_text(TEXT)
        self.write(config)

    def write(self, config: TrainConfig) -> None:
        """Make `config` the job from the next epoch on."""
        self.config = config
        (self.path / "job.json").write_text(config.to_json())

    def publish(self, epoch: int, num_nodes: int) -> tuple[dist.TCPStore, list[dict[str, str]]]:
        """Do what agents do before they start workers: store, and environments by rank."""
        board = FileBoard(self.path / "board")
        update(board, lambda state: dataclasses.replace(state, epoch=epoch))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(num_nodes):
            Heartbeat(heartbeat_path(self.path, rank), create=True).close()
        ranks = range(num_nodes)
        return store, [self._environment(epoch, rank, num_nodes, store.port) for rank in ranks]

    @contextmanager
    def epoch(
        self, number: int, num_nodes: int, *, absent: tuple[int, ...] = ()
    ) -> Iterator[Group]:
        """Start the workers of an epoch; whatever still runs at the end is killed.

        Ranks in `absent` are started by the caller, with `Group.environments`.
        """
        store, environments = self.publish(number, num_nodes)
        group = Group(self.path, number, store, environments)
        try:
            for rank, env in enumerate(environments):
                if rank in absent:
                    continue
                log = self.path / "logs" / f"e{number}-{rank}"
                worker = _SERVER.Process(target=_work, args=(env, log))
                worker.start()
                group.workers.append(worker)
            yield group
        finally:
            for worker in group.workers:
                worker.kill()
                worker.join()

    def train(self, number: int, num_nodes: int, *, code: int | None = 0) -> None:
        """Run an epoch to its end and see that every worker left with `code`."""
        with self.epoch(number, num_nodes) as group:
            codes = group.wait()
            assert codes == [code] * num_nodes, group.logs()

    def _environment(self, epoch: int, rank: int, world_size: int, port: int) -> dict[str, str]:
        rung = self.config.ladder.rung_for(world_size)
        assert rung is not None, world_size
        return {
            "TORCHELASTIC_RUN_ID": "harness",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if self.config.device == "cuda" else 0),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_ERROR_FILE": str(self.error_file(epoch, rank)),
            "HOLDFAST_RUN_DIR": str(self.path),
            "HOLDFAST_RECORD_DIR": str(self.path),
            "HOLDFAST_EPOCH": str(epoch),
            "HOLDFAST_RUNG": json.dumps(rung.to_dict()),
            "HOLDFAST_NODE": f"n{rank}",
            "HOLDFAST_HEARTBEAT": str(heartbeat_path(self.path, rank)),
            "HOLDFAST_ADDRESS": "127.0.0.1",
            number_faults.VARIABLE: self.number_faults,
            MAX_GROUP: str(self.max_group),
            **self._preparation(last=rank == world_size - 1),
        }

    def _preparation(self, *, last: bool) -> dict[str, str]:
        if self.prepared == "urgent":
            return {PREPARED: "1", "HOLDFAST_URGENT": "1"} if last else {}
        return dict.fromkeys([PREPARED] if self.prepared else [], "1")

    def error_file(self, epoch: int, rank: int) -> Path:
        """Return where `rank` leaves its error."""
        return self.path / "logs" / f"error-e{epoch}-{rank}.json"

    def events(self, name: str | None = None) -> list[Event]:
        """Return the events of all writers, of one name or all, in the order of time."""
        found = []
        for path in event_files(self.path):
            for line in path.read_text().splitlines():
                event = Event.decode(line)
                assert event is not None, line
                found.append(event)
        found.sort(key=lambda event: event.t_mono)
        return [event for event in found if name in (None, event.event)]

    def curve(self, key: str = "loss") -> dict[int, float]:
        """Return step -> field `key` of its last execution."""
        return {e.step: e.fields[key] for e in self.events("step.completed") if e.step is not None}

    def audit(self) -> SampleAudit:
        """Return the ledger's account."""
        files = [p.read_text().splitlines() for p in sorted((self.path / "ledger").iterdir())]
        return audit(files, global_batch=self.config.train.global_batch)

    def fed(self) -> dict[int, list[int]]:
        """Return step -> the samples that all ranks of its last execution fed, sorted."""
        found: dict[tuple[int, int], list[int]] = {}
        for path in sorted((self.path / "ledger").iterdir()):
            head, *lines = map(json.loads, path.read_text().splitlines())
            for line in lines:
                samples = [s for start, stop in line["samples"] for s in range(start, stop)]
                found.setdefault((head["epoch"], line["step"]), []).extend(samples)
        return {step: sorted(samples) for (_, step), samples in sorted(found.items())}

    def commits(self) -> list[Commit]:
        """Return the checkpoints that count, newest last."""
        current = FileBoard(self.path / "board").get_state()
        return list(BoardState.decode(current[0]).commits) if current else []

    def tensors(self) -> dict[str, Tensor]:
        """Return the newest checkpoint's tensors, put together, by name."""
        path = Path(self.config.checkpoint.dir) / self.commits()[-1].dir
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is unavailable", UserWarning)
            loaded = _load_state_dict_from_keys(storage_reader=FileSystemReader(path))
        return dict(_flat(loaded))


def heartbeat_path(run: Path, rank: int) -> Path:
    """Return where `rank` beats."""
    return run / f"heartbeat-{rank}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _work(env: dict[str, str], log: Path) -> None:
    """Body of a forked worker: what the zygote's child does."""
    gc.freeze()  # the server's: looking through it would copy its pages
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    rank_grid.MAX_GROUP = int(env[MAX_GROUP])
    code = 1
    try:
        if env.get(number_faults.VARIABLE):
            code = number_faults.main()
        else:
            code = train.main(hold=time.monotonic if PREPARED in env else None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's end: a save's thread may still be inside gloo.
        os._exit(code)

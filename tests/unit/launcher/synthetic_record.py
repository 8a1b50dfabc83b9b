"""Builds event streams as agents and trainers would write them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.record.events import Event

START_S = 0.8
"""From a formed epoch to its trainers being ready."""
STEP_S = 0.1
PHASES = {"form_epoch": 0.1, "fork": 0.05, "process_group": 0.1, "model": 0.3, "restore": 0.25}


def config_of(
    steps: int = 120, nodes: tuple[int, ...] = (4,), tokens_per_s: float | None = None
) -> TrainConfig:
    """Return the job.json of a run with a data-parallel rung for each of `nodes`.

    `tokens_per_s` is what was predicted for each node of a rung; None: nothing.
    """
    rungs = [
        Rung(
            num_nodes=n,
            layout=ParallelLayout(dp=n),
            micro_batches=1,
            tokens_per_s=None if tokens_per_s is None else n * tokens_per_s,
        )
        for n in nodes
    ]
    return TrainConfig(
        name="t",
        run_id="run-1",
        model_name="tiny",
        model=ModelShape(num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8),
        ladder=Ladder(tuple(rungs)),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=8, global_batch=12, steps=steps),
        data=DataSection(path="/nowhere"),
        checkpoint=CheckpointSection(dir="/nowhere"),
        elastic=ElasticSection(hang_ceiling_s=300.0, start_ceiling_s=900.0),
    )


@dataclass
class Stream:
    t: float = 1000.0
    events: list[Event] = field(default_factory=list)
    epoch: int = 0
    step: int = 0

    def add(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        known = {k: fields.pop(k, None) for k in ("node", "rank", "epoch", "step")}
        t = self.t if at is None else at
        self.events.append(Event(event=event, t_unix=t, t_mono=t, fields=fields, **known))

    def start(self, nodes: int = 4, attempt: int = 1) -> Stream:
        self.add("run.started", attempt=attempt, nodes=nodes)
        return self

    def form(self, members: list[str], *, resume: int, layout: str | None = None) -> Stream:
        self.epoch += 1
        self.t += 0.1
        layout = layout or f"dp{len(members)}-pp1-cp1-tp1"
        self.add(
            "epoch.formed",
            epoch=self.epoch,
            node=members[0],
            members=members,
            spares=[],
            rung=len(members),
            layout=layout,
            coordinator=members[0],
            reason="start",
        )
        for phase, seconds in PHASES.items():
            for scale, node in enumerate(members, 1):
                self.add(
                    "recovery.phase",
                    epoch=self.epoch,
                    node=node,
                    phase=phase,
                    seconds=seconds * scale / len(members),
                )
        self.t += START_S
        for rank in range(len(members)):
            self.add(
                "trainer.started",
                epoch=self.epoch,
                rank=rank,
                step=resume,
                resume_step=resume,
                layout=layout,
            )
        self.step = resume
        return self

    def steps(self, upto: int, ranks: int = 2) -> Stream:
        while self.step < upto:
            self.step += 1
            self.t += STEP_S
            for rank in reversed(range(ranks)):
                self.add(
                    "step.completed",
                    epoch=self.epoch,
                    step=self.step,
                    rank=rank,
                    loss=2.0 + 3.5 * math.exp(-self.step / 40) + rank,
                    grad_norm=1.0,
                    tokens=512,
                    step_s=0.09,
                    lr=1e-3,
                )
        return self

    def inject(self, action: str, node: str) -> Stream:
        """A fault that nobody has noticed yet."""
        at = {"node": node, "step": self.step, "epoch": self.epoch}
        self.add("fault.injected", **at, action=action, target=node)
        return self

    def kill_node(self, node: str, *, action: str = "kill-node", detect_s: float = 0.02) -> Stream:
        self.inject(action, node).t += detect_s
        self.add("member.lost", epoch=self.epoch, node="node0", member=node, reason="EOF")
        self.add("recovery.phase", epoch=self.epoch, node="node0", phase="detect", seconds=detect_s)
        self.add("epoch.aborted", epoch=self.epoch, node="node0", reason="lost", victims=[node])
        self.add(
            "worker.exit",
            epoch=self.epoch,
            node="node0",
            worker_rank=0,
            local_rank=0,
            code=1,
            kind="collateral",
            action="restart",
            detail="Connection reset by peer",
        )
        return self

    def end(self, code: int = 0) -> Stream:
        self.add("run.ended", code=code)
        return self


def storm() -> Stream:
    """Four nodes; one dies, the coordinator dies with an uncommitted step, one comes back."""
    nodes = [f"node{i}" for i in range(4)]
    stream = Stream().start().form(nodes, resume=0).steps(30).kill_node("node2")
    stream.form(["node0", "node1", "node3"], resume=28).steps(60)
    stream.kill_node("node0", action="kill-coordinator", detect_s=0.3)
    stream.form(["node1", "node3"], resume=60).steps(90)
    stream.inject("return-node", "node2")
    stream.add("member.joined", epoch=3, node="node1", member="node2")
    stream.add("trainer.stopping", epoch=3, step=90, rank=0, why="grow")
    stream.form(["node1", "node3", "node2"], resume=90).steps(120)
    stream.add("checkpoint.committed", epoch=4, step=120, dir="x")
    stream.add("trainer.finished", epoch=4, step=120, loss=2.1)
    return stream.end()

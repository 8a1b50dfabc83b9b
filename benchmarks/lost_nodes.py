"""What the loss of nodes costs: the planned ladder beside one that gives up whole replicas.

    python benchmarks/lost_nodes.py

Predicted, no job runs. Each job has the fastest layout of all its nodes; costs are shares of its
predicted speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from common import table

from elastic_trainer.plan.ladder import Rung
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan, speeds_of
from launcher.plan.rungs import num_rounds, rungs
from launcher.plan.step_time import step_time
from launcher.spec.errors import UserError
from launcher.spec.spec import JobSpec

MODELS: Final = ("llama3-8b", "llama3-70b", "llama3-405b")
NODES: Final = {8: 512, 16: 512, 64: 1024, 2048: 2048}
"""Nodes -> sequences of 8,192 tokens in a step."""
LOST: Final = (1, 2, 5)


def job(model: str, nodes: int) -> JobSpec | None:
    """Return a job with the fastest layout; None: no layout fits."""
    values = {
        "name": "job",
        "model": model,
        "layout": "auto",
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "gpu": "H100-80GB-SXM"},
        "train": {
            "seq_len": 8192,
            "global_batch": NODES[nodes],
            "recompute": "none" if model == "llama3-8b" else "selective",
            "steps": 1,
        },
        "data": {"path": "x"},
        "elastic": {"min_nodes": nodes // 4},
    }
    try:
        return load_spec(values)
    except UserError:
        return None


def speed(spec: JobSpec, rung: Rung) -> float:
    """Return the predicted tokens/s of a rung that was planned without."""
    speeds, layout = speeds_of(spec), rung.layout
    assert speeds is not None
    work = spec.facts.work(layout)
    seconds = step_time(work, layout, num_rounds(spec.facts, layout), *speeds).total
    return spec.train.global_batch * spec.train.seq_len / seconds


def by_replicas(spec: JobSpec) -> list[Rung]:
    """Return the ladder that gives up whole replicas first, with predicted speeds."""
    sizes = range(spec.min_nodes, spec.cluster.nodes + 1)
    plain = rungs(spec.facts, spec.full_layout, spec.min_nodes, sizes, None, standby=True)
    return [replace(each, tokens_per_s=speed(spec, each)) for each in plain]


def rows() -> Iterator[list[object]]:
    """Yield a row for each job and loss."""
    for nodes in NODES:
        for model in MODELS:
            spec = job(model, nodes)
            if spec is None:
                yield [nodes, model, "does not fit", "", "", "", ""]
                continue
            ladders = [by_replicas(spec), plan(spec).ladder.rungs]
            top = ladders[1][0]
            for lost in LOST:
                cells: list[object] = []
                for ladder in ladders:
                    rung = next((r for r in ladder if r.num_nodes <= nodes - lost), None)
                    if rung is None:
                        cells += ["waits", ""]
                        continue
                    assert rung.tokens_per_s is not None
                    assert top.tokens_per_s is not None
                    cost = 1 - rung.tokens_per_s / top.tokens_per_s
                    idle = nodes - lost - rung.num_nodes
                    cells += [f"{rung.layout.label}, {idle} idle", f"{cost:.1%}"]
                share = f"{lost / nodes:.1%}"
                yield [nodes, f"{model} {top.layout.label}", lost, share, *cells]


if __name__ == "__main__":
    print(
        table(
            ["nodes", "job", "lost", "share", "by replicas", "cost", "planned", "cost"],
            rows(),
        )
    )

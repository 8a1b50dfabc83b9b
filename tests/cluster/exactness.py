"""Every legal layout of the tiny models against one process: the table of docs/exactness.md.

    python tests/cluster/exactness.py > docs/exactness.md

Real workers over gloo, the trainer itself, fp32, 10 steps. Each layout trains twice, to
see that it does the same twice.
"""

from __future__ import annotations

import itertools
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import torch
from harness import Run, make_config
from torch import Tensor

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.layout import AXES, ParallelLayout, layout_label
from elastic_trainer.plan.models import PRESETS
from launcher.spec.rules import JobFacts, layout_findings

BOUND = 2e-6
"""Relative; the project's definition of agreement between layouts."""
MAX_WORLD = 8
SEQ_LEN, GLOBAL_BATCH, STEPS = 48, 10, 10
"""48 tokens fall into the zigzag halves of cp 2, 3, 4, 6 and 8; 10 samples are uneven
for dp 3, 4, 6, 7 and 8, and with micro-batches of 2 for dp 2 as well."""
LR = 3e-4
"""The default. Ten times as much makes the gradient of step 4 spike, and the spike amplifies
the rounding of the steps before it to 1e-5 of the norm, whatever the layout."""


@dataclass(frozen=True)
class Case:
    """One layout, as the launcher would accept it."""

    layout: ParallelLayout
    model: str = "tiny"
    interleave: int = 1
    micro_batch: int = 1
    precision: str = "fp32"
    no_sync: bool = False

    def __str__(self) -> str:
        return str(self.layout) + (f"-x{self.interleave}" if self.interleave > 1 else "")


@dataclass(frozen=True)
class Errors:
    """Largest relative differences from one process."""

    loss: float
    grad_norm: float
    gradients: float
    """Of all gradients, elementwise: the L2 norm of the difference of AdamW's first moments."""


def cases() -> Iterator[Case]:
    """Yield every legal layout of at most MAX_WORLD ranks: tiny's, and tiny-wide's with tp 4.

    Legal is what the launcher's rules say; HF111 aside, since lower rungs pad.
    """
    degrees = range(1, MAX_WORLD + 1)
    for model, tps in (("tiny", degrees), ("tiny-wide", (4,))):
        for dp, pp, cp, tp in itertools.product(degrees, degrees, degrees, tps):
            if dp * pp * cp * tp > MAX_WORLD:
                continue
            for replicate in (r for r in degrees if dp % r == 0):
                layout = ParallelLayout(dp=dp, pp=pp, cp=cp, tp=tp, dp_replicate=replicate)
                for interleave in degrees if pp > 1 else (1,):
                    case = _legal(layout, model, interleave)
                    if case is not None:
                        yield case


def families() -> Iterator[Case]:
    """Yield each axis, and cp with tp, of the other families of models."""
    axes = ({"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"cp": 2, "tp": 2})
    kinds = ("qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe", "granite")
    for kind in (*kinds, "olmo2", "olmo3", "gemma3"):
        for degrees in axes:
            yield Case(ParallelLayout(**degrees), f"tiny-{kind}", micro_batch=5)
    alone = {"dp": 2, "ep": 2}
    for degrees in (alone, *({**alone, axis: 2} for axis in ("tp", "cp", "pp"))):
        yield Case(ParallelLayout(**degrees), "tiny-mixtral", micro_batch=2)
    yield Case(ParallelLayout(**alone), "tiny-qwen3-moe", micro_batch=2)
    for degrees in ({"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "dp_replicate": 2, "ep": 2}):
        yield Case(ParallelLayout(**degrees), "tiny-mixtral", micro_batch=1)


def rounded() -> Iterator[Case]:
    """Yield the longest dp in bf16, against one process in bf16."""
    yield Case(ParallelLayout(dp=MAX_WORLD), precision="bf16")


def reduced_once() -> Iterator[Case]:
    """Yield layouts whose gradients are reduced after a step's last micro-batch only."""
    for degrees in (
        *({"dp": dp} for dp in (2, 3, 8)),
        {"dp": 4, "dp_replicate": 2},
        *({"dp": 2, axis: 2} for axis in ("tp", "cp")),
    ):
        yield Case(ParallelLayout(**degrees), micro_batch=1, no_sync=True)
    yield Case(ParallelLayout(dp=4, ep=2), "tiny-mixtral", micro_batch=1, no_sync=True)


def other_orders() -> Iterator[Case]:
    """Yield the same degrees in other orders of the ranks: each axis innermost once."""
    for shift in range(1, len(AXES)):
        order = AXES[shift:] + AXES[:shift]
        for degrees in ({"dp": 2, "tp": 2, "pp": 2}, {"dp": 2, "cp": 2, "tp": 2}):
            yield Case(ParallelLayout(**degrees, order=order), micro_batch=2)


def _legal(layout: ParallelLayout, model: str, interleave: int) -> Case | None:
    for micro_batch in (2, 1):
        facts = JobFacts(
            model_name=model,
            shape=PRESETS[model],
            nodes=1,
            gpus_per_node=MAX_WORLD,
            domain=MAX_WORLD,
            seq_len=SEQ_LEN,
            global_batch=GLOBAL_BATCH,
            micro_batch=micro_batch,
            schedule="interleaved" if interleave > 1 else "1f1b",
            interleave=interleave,
        )
        if all(finding.code == "HF111" for finding in layout_findings(facts, layout)):
            return Case(layout, model, interleave, micro_batch)
    return None


def config_of(path: Path, case: Case, **sections: Any) -> TrainConfig:
    """Return the job.json of `case` in the new folder `path`; `sections` is of `train`."""
    path.mkdir(parents=True)
    values = {
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
        "steps": STEPS,
        "micro_batch": case.micro_batch,
        "precision": case.precision,
        "no_sync": case.no_sync,
        **sections,
    }
    return make_config(
        path,
        case.layout,
        model=PRESETS[case.model],
        optimizer={"lr": LR},
        interleave=case.interleave,
        **values,
    )


def trained(path: Path, case: Case, **sections: Any) -> Run:
    """Train `case` in the new folder `path`; `sections` is of `train`."""
    run = Run(path, config_of(path, case, **sections))
    run.train(1, case.layout.world_size)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (run.config.train.steps, 0, 0), (
        account
    )
    return run


def compare(run: Run, reference: Run) -> Errors:
    """Return how far `run` is from one process."""
    worst = {}
    for key in ("loss", "grad_norm"):
        ours, theirs = run.curve(key), reference.curve(key)
        assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
        worst[key] = max(abs(ours[step] / theirs[step] - 1) for step in theirs)
    ours, theirs = run.tensors(), reference.tensors()
    assert ours.keys() == theirs.keys()
    moments = [name for name in theirs if name.endswith(".exp_avg")]
    difference = sum((ours[n] - theirs[n]).double().square().sum().item() for n in moments)
    size = sum(theirs[n].double().square().sum().item() for n in moments)
    return Errors(**worst, gradients=(difference / size) ** 0.5)


def identical(run: Run, other: Run) -> bool:
    """Return whether two runs are the same bit for bit: curves and the last state."""
    curves = all(run.curve(key) == other.curve(key) for key in ("loss", "grad_norm", "lr"))
    ours, theirs = run.tensors(), other.tensors()
    same = ours.keys() == theirs.keys()
    return curves and same and all(bits(t) == bits(theirs[n]) for n, t in ours.items())


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's bytes: a NaN is no other tensor's equal, but may be the same bits."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@click.command(help=__doc__)
@click.option("--match", default="", help="Only cases with this in `model layout precision`.")
def main(match: str) -> None:
    """Print the table; exit with 1 when a layout is out of bounds."""
    harness.DEADLINE_S = 1800.0  # nobody waits for it
    rows, bad, began = [], 0, time.monotonic()
    known = (*cases(), *other_orders(), *reduced_once(), *families(), *rounded())
    chosen = [case for case in known if match in f"{case.model} {case} {case.precision}"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kinds = sorted({(case.model, case.precision) for case in chosen})
        references = {
            (model, precision): trained(
                root / f"{model}-{precision}",
                Case(ParallelLayout(), model, precision=precision),
            )
            for model, precision in kinds
        }
        for number, case in enumerate(chosen):
            run, again = (trained(root / f"{number}-{i}", case) for i in range(2))
            errors = compare(run, references[case.model, case.precision])
            same = identical(run, again)
            good = max(errors.loss, errors.grad_norm) <= BOUND and same
            bad += not good
            cells = (
                f"`{layout_label(str(case))}`",
                case.model + ("" if case.precision == "fp32" else f", {case.precision}"),
                str(case.layout.world_size),
                f"{case.micro_batch} x {run.config.ladder.rungs[0].micro_batches}"
                + (", no_sync" if case.no_sync else ""),
                f"{errors.loss:.1e}",
                f"{errors.grad_norm:.1e}",
                f"{errors.gradients:.1e}",
                "yes" if same else "**no**",
            )
            rows.append(f"| {' | '.join(cells)} |" + ("" if good else " **out of bounds**"))
            sys.stderr.write(f"{number + 1}/{len(chosen)} {rows[-1]}\n")
    sys.stdout.write(_page(rows, bad, time.monotonic() - began))
    sys.exit(int(bad > 0))


def _page(rows: list[str], bad: int, seconds: float) -> str:
    verdict = "All are within the bound." if not bad else f"**{bad} are out of bounds.**"
    return f"""# Exactness

Generated by `make exactness`; do not edit.

Every legal layout of at most {MAX_WORLD} ranks of the tiny Llamas, orders of the axes other than
the default, each axis of the other families, and expert parallelism, against one process: the same
weights, the same {GLOBAL_BATCH} sequences of {SEQ_LEN} tokens a step, fp32, AdamW at {LR:g},
{STEPS} steps. Errors are relative, the largest over the steps; the bound for loss and gradient norm
is {BOUND:g}; in bf16, against one process in bf16, it would be missed a hundredfold with
gradients reduced in bf16.
*gradients* compares every element: the L2 norm of the difference of AdamW's first
moments after step {STEPS}. *twice* says whether a second run of the layout was the same bit for
bit, state included. *micro-batches* are sequences each x how many a dp rank runs; where dp does not
divide them, the last ones weigh zero; `no_sync`: gradients are reduced after the
last one only. `x2` marks the interleaved schedule with 2 stages a rank.

{len(rows)} layouts, {seconds / 60:.0f} minutes, torch {torch.__version__} on {platform.machine()}.
{verdict}

| layout | model | ranks | micro-batches | loss | gradient norm | gradients | twice |
| --- | --- | --- | --- | --- | --- | --- | --- |
""" + "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()

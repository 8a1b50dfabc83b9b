"""Faults in a worker's numbers, as data: `nan@5,spike@9,bitflip@7:2`; for tests only.

The tests' own worker entry (harness.py), or the zygote of real agents (through a `sitecustomize`
that a test puts on their path), calls `install`. The trainer itself knows nothing of it.

- `nan@STEP`: the batch of STEP makes a gradient that is no number, on the last rank.
- `spike@STEP`: the batch of STEP makes a loss and gradients 40 times as large, on all ranks.
- `bitflip@STEP:RANK`: once, after STEP, one bit of a parameter of RANK changes.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

VARIABLE = "HOLDFAST_TEST_NUMBERS"
_FORM = re.compile(r"(?P<action>nan|spike|bitflip)@(?P<step>[0-9]+)(?::(?P<rank>[0-9]+))?")
SITECUSTOMIZE = """\
import sys
if "elastic_trainer.agent" in " ".join(sys.orig_argv):
    sys.path.append({folder!r})
    import number_faults
    number_faults.install_in_zygote()
"""
"""For real agents: only their zygotes are touched."""


@dataclass(frozen=True, slots=True)
class NumberFault:
    """One fault."""

    action: str
    step: int
    rank: int | None = None


def parse(text: str) -> list[NumberFault]:
    """Read `nan@5,bitflip@7:2`."""
    faults = []
    for part in filter(None, text.split(",")):
        match = _FORM.fullmatch(part)
        assert match is not None, part
        rank = None if match["rank"] is None else int(match["rank"])
        assert (rank is not None) == (match["action"] == "bitflip"), part
        faults.append(NumberFault(match["action"], int(match["step"]), rank))
    return faults


def install_in_zygote() -> None:
    """Do as `install` in this agent's zygote, once that has imported the trainer."""
    from elastic_trainer.worker.zygote import Zygote

    warm_up = Zygote._warm_up

    def warm_up_and_install(self):
        install()
        warm_up(self)

    Zygote._warm_up = warm_up_and_install


def install() -> None:
    """Make every trainer of this process, and of those it forks, suffer the faults."""
    import torch

    from elastic_trainer.train.trainer import Trainer

    honest = Trainer._train_step

    def train_step(self, step):
        mine = [f for f in parse(os.environ.get(VARIABLE, "")) if f.step == step]
        forward_backward = self.engine.forward_backward
        self.engine.forward_backward = lambda *batch: _spoil(self, mine, forward_backward(*batch))
        try:
            result = honest(self, step)
        finally:
            self.engine.forward_backward = forward_backward
        for fault in mine:
            if fault.action == "bitflip" and fault.rank == self.who.rank and _once(self, fault):
                with torch.no_grad():
                    _flip(next(p for p in self.model.parameters() if p.ndim > 1))
        return result

    Trainer._train_step = train_step


def _spoil(trainer, faults, loss_sum):
    for fault in faults:
        if fault.action == "nan" and trainer.who.rank == trainer.who.world_size - 1:
            _local(next(p for p in trainer.model.parameters() if p.grad is not None).grad)[
                ..., 0
            ] = float("nan")
        if fault.action == "spike":
            loss_sum = loss_sum * 40
            for param in trainer.model.parameters():
                if param.grad is not None:
                    _local(param.grad).mul_(40)
    return loss_sum


def _once(trainer, fault) -> bool:
    """Whether it has not struck yet, in any epoch."""
    path = trainer.who.run_dir / f"struck-{fault.action}-{fault.step}-{fault.rank}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _flip(param) -> None:
    import torch

    bits = _local(param).view(-1).view(torch.int32)
    bits[bits.numel() // 2] ^= 1 << 12


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> int:
    """Train with the faults that the environment names."""
    from elastic_trainer.train import main as train

    install()
    return train.main()


if __name__ == "__main__":
    sys.exit(main())

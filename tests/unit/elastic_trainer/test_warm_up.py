"""What a standby has compiled is used only where it is of the same shapes and groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.train import warm_up
from elastic_trainer.train.engine import Engine


def engine(layout: ParallelLayout, *names: str) -> Engine:
    groups = [SimpleNamespace(group_name=name) for name in names]
    return cast(Any, SimpleNamespace(layout=layout, meshes=SimpleNamespace(groups=groups)))


@pytest.mark.parametrize(
    ("now", "dropped"),
    [
        (engine(ParallelLayout(dp=4, tp=2), "2", "3"), False),
        (engine(ParallelLayout(dp=3, tp=2), "2", "3"), False),
        (engine(ParallelLayout(dp=2, tp=4), "2", "3"), True),
        (engine(ParallelLayout(dp=4, tp=2), "3", "4"), True),
    ],
)
def test_code_for_other_shapes_or_other_groups_is_dropped(
    now: Engine, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[bool] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    warmed = warm_up._compiled_as(engine(ParallelLayout(dp=4, tp=2), "2", "3"))
    monkeypatch.setattr(warm_up, "_compiled_for", [warmed])
    warm_up.forget_others(now)
    assert bool(resets) == dropped
    warm_up.forget_others(now)
    assert bool(resets) == dropped, "a worker that was not a standby has nothing to drop"

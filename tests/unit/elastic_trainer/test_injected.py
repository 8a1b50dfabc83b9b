from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic_trainer.model.decoder import Decoder, rope_table
from elastic_trainer.plan import injected
from elastic_trainer.plan.injected import SLOW_S, VARIABLE, Inside, listen
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.train.marks import mark_compiling, mark_stage
from elastic_trainer.worker.heartbeat import Heartbeat, Section, StepPart

SHAPE = ModelShape(num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=32)


def test_compiling_is_marked_whenever_it_happens() -> None:
    marks: list[int] = []
    mark_compiling(marks.append)
    try:
        torch.compile(torch.neg, backend="eager")(torch.ones(2))
        assert marks == [StepPart.COMPILE, StepPart.FORWARD]
    finally:
        torch._dynamo.callback.callback_handler.clear()


@pytest.fixture
def trainer() -> Iterator[SimpleNamespace]:
    """What a fault touches of a trainer; signal handlers are as before at the end."""
    before = {kind: signal.getsignal(kind) for kind in Inside}
    feed = SimpleNamespace(micro_batches=lambda step: iter([step, step]))
    engine = SimpleNamespace(stages=[], model=Decoder(SHAPE))
    yield SimpleNamespace(feed=feed, engine=engine, sum_over_ranks=lambda values: values)
    for kind, handler in before.items():
        signal.signal(kind, handler)


def ask(kind: Inside) -> None:
    os.kill(os.getpid(), kind)  # Python serves a signal to itself before the next line


def test_nobody_listens_unless_the_environment_says_so(trainer: SimpleNamespace) -> None:
    listen(trainer, {})
    assert all(signal.getsignal(kind) == signal.SIG_DFL for kind in Inside)
    listen(trainer, {VARIABLE: "emulated"})
    assert all(callable(signal.getsignal(kind)) for kind in Inside)


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        (Inside.WEDGE, lambda trainer: trainer.sum_over_ranks(None)),
        (Inside.STARVE, lambda trainer: next(trainer.feed.micro_batches(3))),
    ],
)
def test_what_was_fine_does_not_return_any_more(trainer, kind, use, monkeypatch) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(injected.time, "sleep", sleep)
    listen(trainer, {VARIABLE: "emulated"})
    use(trainer)
    ask(kind)
    with pytest.raises(TimeoutError):
        use(trainer)
    assert slept == [injected.FOR_EVER_S]


def test_a_slow_worker_loses_its_time_in_forward(trainer: SimpleNamespace, tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path / "heartbeat", create=True)
    model, rope = trainer.engine.model, rope_table(SHAPE, torch.arange(4), torch.device("cpu"))
    mark_stage(model, beat.mark, in_pipeline=False, compiled=False)
    listen(trainer, {VARIABLE: "emulated"})
    ask(Inside.SLOW)
    beat.beat(step=1, section=Section.STEP)
    for _ in range(2):
        model(torch.zeros((1, 4), dtype=torch.int64), rope)
    beat.mark(StepPart.OTHER)
    totals = beat.pace().totals_s
    assert totals[StepPart.FORWARD] >= 2 * SLOW_S
    assert totals[StepPart.FORWARD] == max(totals)
    beat.close()

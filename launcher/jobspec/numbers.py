"""The section `numbers:` of a job file. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from launcher.jobspec.values import Count, Section, Steps

SpikeAction = Literal["ignore", "report", "skip", "rollback", "stop"]
Above = Annotated[float, Field(gt=1, le=1e9, allow_inf_nan=False)]


class Numbers(Section):
    """What follows from wrong numbers."""

    non_finite: Literal["skip", "rollback", "stop"] = Field(
        "skip",
        description="Loss or gradient norm is NaN or infinite: skip the batch, go back and skip, "
        "or stop (exit code 93). Such a gradient is never applied.",
    )
    loss_spike: SpikeAction = Field(
        "report", description="A loss far above those before: ignore, report, skip, rollback, stop."
    )
    grad_spike: SpikeAction = Field("report", description="The same, of the gradient norm.")
    loss_ratio: Above = Field(
        1.5, description="A spike is more than this many times the median of the window."
    )
    grad_ratio: Above = Field(5.0, description="The same, of the gradient norm.")
    window: Annotated[int, Field(ge=8, le=256)] = Field(
        64, description="Steps of the median; no verdict before half of them."
    )
    rollback_steps: Count = Field(
        10, description="Steps a rollback goes back at least; their batches are passed over."
    )
    max_skips: Steps = Field(
        10, description="Skips and rollbacks within 1,000 steps; then exit code 93."
    )
    replica_check_steps: Count | None = Field(
        None, description="Compare replicas of parameters every this many steps; null: never."
    )

"""What this rank feeds to forward: its micro-batches of a step, and the ledger of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_trainer.config import TrainSection
from elastic_trainer.data import IGNORED, Corpus
from elastic_trainer.data.index import micro_batch_samples, samples_of_step
from elastic_trainer.ladder import Rung
from elastic_trainer.parallel.context import zigzag_positions
from elastic_trainer.training.ledger import LedgerWriter


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one forward pass, each (B, T / cp) int64 on the device."""

    inputs: Tensor
    targets: Tensor
    """IGNORED everywhere in a micro-batch that only fills up the step."""
    documents: Tensor | None = None
    """See `Samples`."""


class Feed:
    """Reads the corpus for one rank.

    Args:
        corpus: open.
        train: sizes of the batch.
        rung: the layout, and how many micro-batches every dp rank runs.
        coordinate: this rank's, from `layout.coordinate`.
        ledger: of this rank's dp index; None on ranks that leave it to another.
        device: where the tokens go.
        stop: samples from here on count nothing; None: all count.
    """

    def __init__(
        self,
        corpus: Corpus,
        train: TrainSection,
        rung: Rung,
        *,
        coordinate: dict[str, int],
        ledger: LedgerWriter | None,
        device: torch.device,
        stop: int | None = None,
    ) -> None:
        self._corpus, self._train, self._rung, self._stop = corpus, train, rung, stop
        self._dp_rank, self._ledger, self._device = coordinate["dp"], ledger, device
        self._positions = zigzag_positions(train.seq_len, rung.layout.cp, coordinate["cp"])

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of `step`; what is yielded counts as fed."""
        train = self._train
        for samples in self._samples_of(step):
            if samples is not None and self._ledger is not None:
                self._ledger.fed(samples)
            first = (step - 1) * train.global_batch
            used = samples if samples is not None else range(first, first + train.micro_batch)
            found = self._corpus.samples(used)
            targets = found.targets
            if samples is None:  # any tokens will do
                targets = torch.full_like(targets, IGNORED)
            elif self._stop is not None:
                targets[max(0, self._stop - samples.start) :] = IGNORED
            yield MicroBatch(
                self._part(found.inputs),
                self._part(targets),
                None if found.documents is None else self._part(found.documents),
            )

    def tokens(self, step: int) -> int:
        """Return how many targets of the global batch of `step` count in the loss."""
        return self._corpus.counted(samples_of_step(step, self._train.global_batch))

    def _samples_of(self, step: int) -> Iterable[range | None]:
        train = self._train
        return micro_batch_samples(
            step,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            dp=self._rung.layout.dp,
            dp_rank=self._dp_rank,
            rounds=self._rung.micro_batches,
        )

    def _part(self, rows: Tensor) -> Tensor:
        """Copy this rank's positions to the device.

        On CUDA behind what runs, for a copy of pageable memory waits for all of it.
        """
        tokens = rows[:, self._positions]
        if self._device.type != "cuda":
            return tokens.to(self._device)
        return tokens.pin_memory().to(self._device, non_blocking=True)

    def pass_over(self, step: int) -> None:
        """Count this rank's samples of `step` as consumed, without reading them."""
        if self._ledger is not None:
            for samples in self._samples_of(step):
                if samples is not None:
                    self._ledger.fed(samples)
            self._ledger.end_step(step, skipped=True)

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Note that the optimizer has used the gradient of `step`, or dropped it (`skipped`)."""
        if self._ledger is not None:
            self._ledger.end_step(step, skipped=skipped)

    @property
    def behind(self) -> bool:
        """Whether this rank's ledger waits for its storage; until then no step is committed."""
        return self._ledger is not None and self._ledger.behind

    def flush(self, timeout_s: float) -> bool:
        """Wait for the ledger's storage, at most `timeout_s`; return whether all is written."""
        return self._ledger is None or self._ledger.flush(timeout_s)

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()

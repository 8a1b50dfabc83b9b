"""The loss on data that is not trained on: which batches, when, and their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from elastic_trainer.data import Corpus, Crew, open_corpus
from elastic_trainer.data.source import errors_told_of
from elastic_trainer.plan.config import TrainConfig, ValidationSection
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.train.feed import Feed, MicroBatch
from elastic_trainer.worker.heartbeat import Request

_LEAVE = (Request.STOP, Request.GROW)


class Validator:
    """Validates one worker's part of the model; all ranks do so at the same steps.

    Raises:
        DataError: see `open_corpus`.
        OSError: the cache or the pin cannot be written.
    """

    def __init__(
        self,
        section: ValidationSection,
        config: TrainConfig,
        rung: Rung,
        *,
        run_dir: Path,
        coordinate: dict[str, int],
        device: torch.device,
        crew: Crew,
    ) -> None:
        self._section, self._train = section, config.train
        with errors_told_of("validation.path"):
            corpus = open_corpus(
                config.data.at(section.path),
                seq_len=config.train.seq_len,
                seed=config.train.seed,
                vocab_size=config.model.vocab_size,
                cache_dir=run_dir / "cache",
                pinned_as="validation.json",
                crew=crew,
            )
        assert isinstance(corpus, Corpus), "a section of one path"
        self._corpus = corpus
        num_samples = corpus.num_windows  # each once
        if section.batches is not None:
            num_samples = min(num_samples, section.batches * config.train.global_batch)
        self._samples = range(num_samples)
        self._feed = Feed(
            self._corpus,
            config.train,
            rung,
            coordinate=coordinate,
            ledger=None,
            device=device,
            stop=num_samples,
        )

    def due(self, step: int) -> bool:
        """Return whether the state after `step` is to be validated."""
        return step > 0 and (step % self._section.every_steps == 0 or step == self._train.steps)

    @cached_property
    def tokens(self) -> int:
        """Targets that count, of all batches."""
        return self._corpus.counted(self._samples)

    def run(
        self,
        losses: Callable[[Iterable[MicroBatch]], Tensor],
        *,
        asked: Callable[[], Request],
        sum_over_ranks: Callable[[Tensor], None],
    ) -> float | Request:
        """Return the mean loss, or the request that ended it before; collective.

        `losses` adds up the losses of this rank's micro-batches of a global batch, `asked` returns
        what this rank's agent asks for, `sum_over_ranks` adds up a tensor in place.
        """
        total, last = 0.0, -(-len(self._samples) // self._train.global_batch)
        for number in range(1, last + 1):
            loss_sum = losses(self._feed.micro_batches(number)).cpu()
            flags = [float(bool(asked() & request)) for request in _LEAVE]
            sums = torch.cat([loss_sum.reshape(1), loss_sum.new_tensor(flags)])
            sum_over_ranks(sums)
            loss, *votes = sums.tolist()
            total += loss
            for request, vote in zip(_LEAVE, votes, strict=True):
                if vote and number < last:
                    return request
        return total / self.tokens

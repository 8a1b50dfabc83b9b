"""What this rank feeds to forward: its micro-batches of a step, and the ledger of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from elastic_trainer.data import IGNORED, Corpus, CorpusMix, Samples
from elastic_trainer.data.index import micro_batch_samples, samples_of_step
from elastic_trainer.parallel.context import zigzag_positions
from elastic_trainer.plan.config import TrainSection
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.storage.write_behind import WriteBehind


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one forward pass, each (B, T / cp) int64 on the device."""

    inputs: Tensor
    targets: Tensor
    """IGNORED everywhere in a micro-batch that only fills up the step."""
    documents: Tensor | None = None
    """See `Samples`."""


class Feed:
    """Reads the corpus for the rank at `coordinate` of the layout.

    `ledger` is that of its dp index; None on ranks that leave it to another. Samples from `stop` on
    count nothing; None: all count.
    """

    def __init__(
        self,
        corpus: Corpus | CorpusMix,
        train: TrainSection,
        rung: Rung,
        *,
        coordinate: dict[str, int],
        ledger: SampleLedger | None,
        device: torch.device,
        stop: int | None = None,
    ) -> None:
        self._corpus, self._train, self._rung, self._stop = corpus, train, rung, stop
        self._dp_rank, self._ledger, self._device = coordinate["dp"], ledger, device
        self._positions = zigzag_positions(train.seq_len, rung.layout.cp, coordinate["cp"])
        self._last = train.steps if stop is None else -(-stop // train.global_batch)
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: dict[int, list[Future[Samples]]] = {}
        """Step -> what is read of it; of one step before it is asked for."""

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of `step`; what is yielded counts as fed.

        A thread reads those of the next step meanwhile. What it meets there is raised there.
        """
        coming = self._ahead.pop(step, None) or self._read_ahead(step)
        for read in itertools.chain(*self._ahead.values()):  # of a step that was passed over
            read.cancel()
        self._ahead = {step + 1: self._read_ahead(step + 1)} if step < self._last else {}
        for samples, read in zip(self._samples_of(step), coming, strict=True):
            tokens = read.result()
            if samples is not None and self._ledger is not None:
                self._ledger.fed(samples)
            yield MicroBatch(
                *(
                    None if each is None else each.to(self._device, non_blocking=True)
                    for each in tokens
                )
            )

    def _read_ahead(self, step: int) -> list[Future[Samples]]:
        if self._reader is None:
            on_cuda = self._device.type == "cuda"
            # Else the thread's first pinned memory would make a context on the first GPU.
            prepare = partial(torch.cuda.set_device, self._device) if on_cuda else None
            self._reader = ThreadPoolExecutor(1, "holdfast-feed", initializer=prepare)
        return [
            self._reader.submit(self._read, step, samples) for samples in self._samples_of(step)
        ]

    def _read(self, step: int, samples: range | None) -> Samples:
        """Return this rank's positions of a micro-batch; on CUDA in pinned memory."""
        train = self._train
        first = (step - 1) * train.global_batch
        used = samples if samples is not None else range(first, first + train.micro_batch)
        found = self._corpus.samples(used)
        targets = found.targets
        if samples is None:  # any tokens will do
            targets = torch.full_like(targets, IGNORED)
        elif self._stop is not None:
            targets[max(0, self._stop - samples.start) :] = IGNORED
        return Samples(
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
        tokens = rows[:, self._positions]
        # A copy of pageable memory would wait for all that the device has to do.
        return tokens.pin_memory() if self._device.type == "cuda" else tokens

    def pass_over(self, step: int) -> None:
        """Count this rank's samples of `step` as consumed, without reading them."""
        if self._ledger is not None:
            for samples in filter(None, self._samples_of(step)):
                self._ledger.fed(samples)
            self._ledger.end_step(step, skipped=True)

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Note that the optimizer has used the gradient of `step`, or dropped it (`skipped`)."""
        if self._ledger is not None:
            self._ledger.end_step(step, skipped=skipped)

    @property
    def behind(self) -> bool:
        """Whether this rank's ledger waits for its storage; until then no step is committed."""
        return self._ledger is not None and self._ledger.behind > 0

    def flush(self, timeout_s: float) -> bool:
        """Wait for the ledger's storage, at most `timeout_s`; return whether all is written."""
        return self._ledger is None or self._ledger.flush(timeout_s)

    def close(self) -> None:
        """Close the ledger, and end the thread."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
        if self._ledger is not None:
            self._ledger.close()


# -- The ledger: which samples each step consumed -------------------------------------------------


class SampleLedger(WriteBehind):
    """One file per epoch and dp rank: `ledger/e<epoch>-dp<rank>.jsonl`.

    The first line says where the epoch resumed; each following one is a step and the
    samples, as [start, stop) ranges, that this rank fed to forward with weight one.
    `"skipped": true` says that the step's update was not applied: its batch is used up. Of a mix,
    `taken` says which of its own samples each corpus gave, and the line has them too, by name.

    Training does not wait for the ledger's storage; but no step counts as committed before its
    line is written (`behind`), so that what is committed is never missing here.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        epoch: int,
        dp_rank: int,
        resume_step: int,
        layout: str,
        taken: Callable[[range], Mapping[str, range]] | None = None,
    ) -> None:
        path = run_dir / "ledger" / f"e{epoch:06d}-dp{dp_rank:05d}.jsonl"
        super().__init__(path, must_keep=True)
        self._put({"epoch": epoch, "resume_step": resume_step, "layout": layout})
        self._samples: list[list[int]] = []
        self._taken = taken

    def fed(self, samples: range) -> None:
        """Note the samples of one micro-batch that went into forward."""
        if self._samples and self._samples[-1][1] == samples.start:
            self._samples[-1][1] = samples.stop
        else:
            self._samples.append([samples.start, samples.stop])

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Write the line of `step`; called once the optimizer has used or dropped its gradient."""
        line: dict[str, object] = {"step": step, "samples": self._samples}
        if self._taken is not None:
            given = [self._taken(range(*each)) for each in self._samples]
            names = given[0] if given else ()
            line["sources"] = {
                name: [[own.start, own.stop] for own in (each[name] for each in given) if own]
                for name in names
            }
        self._put({**line, "skipped": True} if skipped else line)
        self._samples = []

    def _put(self, line: dict[str, object]) -> None:
        self.put((json.dumps(line, separators=(",", ":")) + "\n").encode("ascii"))

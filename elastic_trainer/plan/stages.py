"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from elastic_trainer.plan.models import ModelShape


@dataclass(frozen=True, slots=True)
class StageSpan:
    """What one stage holds: the layers `first` up to, but without, `stop`."""

    index: int
    """Position in the pipeline, from 0."""
    first: int
    stop: int
    num_stages: int

    @property
    def has_embedding(self) -> bool:
        """The first stage turns tokens into activations."""
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """The last stage turns activations into logits."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Layer numbers, as in parameter names."""
        return range(self.first, self.stop)


def split_layers(shape: ModelShape, num_stages: int) -> tuple[StageSpan, ...]:
    """Return the stages, as even as whole layers allow.

    Embedding and head count as work: each as much as its share of a layer's
    parameters, for the head multiplies as many and the first stage holds the most
    micro-batches in flight. With 16 stages Llama 3 405B gets 7, 14 x 8 and 7 layers,
    as published (arXiv 2407.21783, section 3.3.2).

    Layer after layer goes to the stage with the least work, which makes the largest
    stage as small as it can be; among equals to the latest, since early stages keep
    more activations.
    """
    assert 1 <= num_stages <= shape.num_layers, f"{num_stages} stages, {shape.num_layers} layers"
    counts = split_evenly(shape.num_layers, num_stages, end_weight(shape))
    stops = list(itertools.accumulate(counts))
    return tuple(
        StageSpan(index, stop - count, stop, num_stages)
        for index, (stop, count) in enumerate(zip(stops, counts, strict=True))
    )


def split_evenly(num_layers: int, num_stages: int, end: float) -> list[int]:
    """Return the layers of each stage; `end` is the work of a table in layers."""
    work = [0.0] * num_stages
    work[0] += end
    work[-1] += end
    counts = [0] * num_stages
    for number in range(num_layers):
        empty = [index for index in range(num_stages) if counts[index] == 0]
        among = empty if len(empty) == num_layers - number else range(num_stages)
        index = min(among, key=lambda i: (work[i], -i))
        counts[index] += 1
        work[index] += 1.0
    return counts


def stages_of_rank(pp_rank: int, pp: int, interleave: int) -> list[int]:
    """Return the stages that pipeline rank `pp_rank` holds: every pp-th one."""
    return list(range(pp_rank, pp * interleave, pp))


def end_weight(shape: ModelShape) -> float:
    """Return the embedding's (and the head's) work in layers: of those a token meets."""
    table = shape.vocab_size * shape.dim
    outside = table * (1 if shape.tie_embeddings else 2) + shape.dim
    return table / ((shape.active_params() - outside) / shape.num_layers)

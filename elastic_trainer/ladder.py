"""The ladder: for each number of nodes a job can live with, the layout it will use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from elastic_trainer.layout import ParallelLayout
from elastic_trainer.quantities import counted


class TooFewNodes(Exception):  # noqa: N818  the field's word for the state, not a bug
    """Fewer nodes are left than the last rung needs: the job parks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder. The global batch is the same on every rung."""

    num_nodes: int
    layout: ParallelLayout
    micro_batches: int
    """Micro-batches every dp rank runs per step, padded ones included."""
    tokens_per_s: float | None = None
    """Predicted; None until the planner predicts it."""
    memory_gib: float | None = None
    """Predicted bytes of the fullest rank in GiB; None until the planner predicts it."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs from most nodes to fewest."""

    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        """Assert the order that `rung_for` relies on."""
        sizes = [rung.num_nodes for rung in self.rungs]
        assert sizes, "a ladder has at least one rung"
        assert all(a > b for a, b in itertools.pairwise(sizes)), f"rungs {sizes}"

    @property
    def max_nodes(self) -> int:
        """Nodes of the top rung."""
        return self.rungs[0].num_nodes

    @property
    def min_nodes(self) -> int:
        """Nodes of the last rung."""
        return self.rungs[-1].num_nodes

    def rung_for(self, num_nodes: int) -> Rung:
        """Return the first rung that `num_nodes` nodes can run.

        Every agent asks after every round and must get the same answer, so it
        depends on its arguments alone. Nodes left over wait as spares.

        Raises:
            TooFewNodes: "3 nodes left, the last rung needs 4: waiting for
                replacements"
        """
        for rung in self.rungs:
            if rung.num_nodes <= num_nodes:
                return rung
        raise TooFewNodes(
            f"{counted(num_nodes, 'node')} left, the last rung needs {self.min_nodes}: "
            "waiting for replacements"
        )

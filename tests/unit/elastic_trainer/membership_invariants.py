"""What no schedule and no fault may break: who may put what on the board, and publish it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_trainer.agent.membership.messages import Formed
from elastic_trainer.agent.membership.notices import EpochFormed
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.board.state import BoardState


def everyone(formed: EpochFormed | None) -> Members:
    """Return what an agent that was told of this epoch last holds."""
    return NOBODY if formed is None else Members.of([*formed.members, *formed.spares])


@dataclass
class Owners:
    """Who won which term, and put which epoch on the board: agent ids."""

    epochs: dict[int, str] = field(default_factory=dict)
    terms: dict[tuple[str, int], str] = field(default_factory=dict)
    """By job: once a lease was given up, the next attempt's terms begin anew."""

    def check_swap(
        self, me: str, old: BoardState, new: BoardState, published: Iterable[int]
    ) -> None:
        """Check a swap of the board by agent `me`, which takes place."""
        holder = new.lease.holder if new.lease else None
        newest = max([old.epoch, *published])
        assert new.epoch in (old.epoch, newest + 1), f"epoch {old.epoch} -> {new.epoch}"
        assert new.commits == old.commits
        assert holder in (me, None), "puts another's name on the board"
        if new.epoch > old.epoch:
            assert old.lease is not None
            assert old.lease.holder == holder == me, "a number without the lease"
            self.epochs[new.epoch] = me
        if new.lease is None:
            assert old.lease is not None
            assert old.lease.holder == me, "gives up another's lease"
            assert new.ended is not None
        elif old.lease is None or (old.lease.holder, old.lease.term) != (me, new.lease.term):
            assert old.lease is None or new.lease.term > old.lease.term
            won = new.lease.job, new.lease.term
            assert self.terms.setdefault(won, me) == me, "two winners of a term"

    def check_published(self, me: str, job: str, formed: Formed) -> None:
        """Check an epoch that agent `me` sends to others."""
        assert self.epochs.get(formed.epoch) == me, "not the number's owner"
        assert self.terms.get((job, formed.term)) == me, "not the term's owner"
        assert len({m.node for m in formed.members}) == len(formed.members)
        assert not {m.host for m in formed.members} & formed.excluded.keys()

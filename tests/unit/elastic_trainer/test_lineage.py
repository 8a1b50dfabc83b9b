"""Which states are on the newest epoch's line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.state import (
    MAX_ORIGINS,
    BoardState,
    Commit,
    Lineage,
    Origin,
    after_damage,
)
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.manifest import with_commit, with_origin


def line(*rows: tuple[int, int, int]) -> Lineage:
    found = Lineage()
    for row in rows:
        found = found.began(Origin(*row))
    return found


def test_an_epoch_that_was_cut_off_does_not_count_however_far_it_got():
    """Epoch 6 began at step 100 of epoch 5, which trained on to 200 all the same."""
    found = line((5, 0, 0), (6, 5, 100))
    assert found.allows(5, 100)
    assert found.allows(6, 150)
    assert not found.allows(5, 101)
    assert not found.allows(5, 200)
    assert not found.allows(7, 200), "nobody knows where it began"


def test_an_epoch_that_began_from_an_older_state_leaves_what_came_between_behind():
    found = line((1, 0, 0), (2, 1, 50), (3, 2, 80), (4, 1, 30))
    assert [found.allows(1, 30), found.allows(4, 31)] == [True, True]
    assert not any(found.allows(*state) for state in [(1, 31), (2, 60), (3, 81)])


def test_an_epoch_that_began_from_nothing_leaves_all_behind():
    found = line((1, 0, 0), (2, 1, 50), (3, 0, 0))
    assert not found.allows(2, 50)
    assert found.allows(3, 1)
    assert found.allows(0, 0), "what the run was imported with"


def test_a_board_of_an_older_version_allows_every_state():
    assert Lineage().allows(7, 10**6)
    found = line((8, 7, 100))
    assert [found.allows(7, 100), found.allows(3, 90)] == [True, True]
    assert [found.allows(7, 101), found.allows(8, 101)] == [False, True]


def test_of_many_epochs_the_newest_are_kept_and_older_states_still_count():
    rows = [(epoch, epoch - 1, 10 * epoch) for epoch in range(1, 3 * MAX_ORIGINS)]
    found = line(*rows)
    assert len(found.origins) == MAX_ORIGINS
    assert found.allows(5, 60)
    newest = rows[-1]
    assert not found.allows(newest[1], newest[2] + 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=30
    )
)
def test_what_counts_is_what_a_walk_from_parent_to_parent_finds(story):
    """Each epoch begins from a state on the line; some train on after another has begun."""
    states: list[tuple[int, int]] = [(0, 0)]
    parents: dict[int, Origin] = {}
    found = Lineage()
    for epoch, (pick, trained, works) in enumerate(story, 1):
        usable = [state for state in states if found.allows(state[0], state[1])]
        parent, step = usable[pick % len(usable)]
        states += [(epoch, step + i) for i in range(1, trained + 1)]
        if works or epoch == 1:
            parents[epoch] = Origin(epoch, parent, step)
            found = found.began(parents[epoch])
        else:
            assert not any(found.allows(*state) for state in states if state[0] == epoch)
    on_line, newest = set(), found.origins[-1].epoch
    epoch, up_to = newest, max(step for _, step in states)
    while epoch in parents:
        on_line |= {state for state in states if state[0] == epoch and state[1] <= up_to}
        epoch, up_to = parents[epoch].parent, parents[epoch].step
    on_line |= {state for state in states if state[0] == epoch and state[1] <= up_to}
    assert {state for state in states if found.allows(*state)} == on_line


def test_it_is_on_the_board_with_the_epochs_first_commit_or_before():
    board, origin = BoardState(epoch=6), Origin(6, 5, 100)
    begun = with_origin(board, origin)
    assert begun is not None
    assert BoardState.decode(begun.encode()) == begun
    assert not begun.allows(5, 101)
    commit = Commit(epoch=6, step=120, dir="d", manifest_sha256="")
    assert with_commit(board, commit, 3, origin).lineage == begun.lineage
    assert with_origin(BoardState(epoch=7), origin) is None, "a newer epoch was published"
    with pytest.raises(FencedError):
        with_commit(BoardState(epoch=7), commit, 3, origin)


def test_a_damaged_board_forgets_it():
    begun = with_origin(BoardState(epoch=6), Origin(6, 5, 100))
    assert begun is not None
    assert BoardState.decode(after_damage(begun.encode(), 1)).allows(7, 130)

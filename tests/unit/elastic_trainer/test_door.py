"""Who may stay at the door, and how often something is said."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.wire.door import Door, Throttle


def test_who_is_slow_goes_when_patience_ends():
    door = Door(10, patience_s=5.0, pressed_s=0.5)
    door.enter(1, "a", 0.0)
    door.enter(3, "b", 1.0)
    assert door.due() == 5.0
    assert door.overdue(4.9) == []
    assert door.overdue(5.0) == [1]
    door.leave(1)
    door.leave(1)
    assert door.due() == 6.0
    assert len(door) == 1


def test_a_full_door_puts_out_the_busiest_hosts_slow_ones():
    door = Door(4, patience_s=5.0, pressed_s=0.5)
    for conn, host, when in [(1, "honest", 0.0), (3, "flood", 0.1), (5, "flood", 0.2)]:
        door.enter(conn, host, when)
    assert door.overdue(1.0) == [], "there is room"
    door.enter(7, "flood", 0.9)
    assert door.full
    assert door.due() == 0.5
    assert door.overdue(1.0) == [3, 5], "not the honest one, nor the newest"


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 0.4), st.booleans()), max_size=60
    )
)
def test_the_door_never_overflows_and_always_opens_again(steps):
    """Whoever proves itself within the pressed time is never put out."""
    now, door, number = 0.0, Door(5, patience_s=5.0, pressed_s=0.5), 0
    entered = {}
    for host, wait_s, proves in steps:
        now += wait_s
        for conn in door.overdue(now):
            assert now - entered[conn] >= 0.5
            door.leave(conn)
            entered.pop(conn)
        if not door.full:
            number += 1
            door.enter(number, host, now)
            if proves:
                door.leave(number)
            else:
                entered[number] = now
        assert len(door) == len(entered) <= 5
    while door.full:
        due = door.due()
        assert due is not None
        now = max(now, due) + 1e-9
        late = door.overdue(now)
        assert late, "a full door has somebody to put out once the oldest is slow"
        for conn in late:
            door.leave(conn)


def test_a_throttle_counts_what_it_holds_back():
    throttle = Throttle(10.0)
    assert throttle.admit(0.0) == 0
    assert [throttle.admit(t) for t in (0.1, 5.0, 9.9)] == [None] * 3
    assert throttle.admit(10.0) == 3
    assert throttle.admit(25.0) == 0

"""Who may stay unproved, and how often something is said."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.wire.client import Throttle
from elastic_trainer.agent.wire.network import AcceptLimiter


def test_who_is_slow_goes_when_patience_ends():
    limiter = AcceptLimiter(10)
    limiter.enter(1, "a", 0.0)
    limiter.enter(3, "b", 1.0)
    assert limiter.due() == 5.0
    assert limiter.overdue(4.9) == []
    assert limiter.overdue(5.0) == [1]
    limiter.leave(1)
    limiter.leave(1)
    assert limiter.due() == 6.0
    assert len(limiter) == 1


def test_a_full_limiter_cuts_off_the_busiest_hosts_slow_ones():
    limiter = AcceptLimiter(4)
    for conn, host, when in [(1, "honest", 0.0), (3, "flood", 0.1), (5, "flood", 0.2)]:
        limiter.enter(conn, host, when)
    assert limiter.overdue(1.0) == [], "there is room"
    limiter.enter(7, "flood", 0.9)
    assert limiter.full
    assert limiter.due() == 0.5
    assert limiter.overdue(1.0) == [3, 5], "not the honest one, nor the newest"


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 0.4), st.booleans()), max_size=60
    )
)
def test_the_limiter_never_overflows_and_always_opens_again(steps):
    """Whoever proves itself within the pressed time is never cut off."""
    now, limiter, number = 0.0, AcceptLimiter(5), 0
    entered = {}
    for host, wait_s, proves in steps:
        now += wait_s
        for conn in limiter.overdue(now):
            assert now - entered[conn] >= 0.5
            limiter.leave(conn)
            entered.pop(conn)
        if not limiter.full:
            number += 1
            limiter.enter(number, host, now)
            if proves:
                limiter.leave(number)
            else:
                entered[number] = now
        assert len(limiter) == len(entered) <= 5
    while limiter.full:
        due = limiter.due()
        assert due is not None
        now = max(now, due) + 1e-9
        late = limiter.overdue(now)
        assert late, "a full limiter has somebody to cut off once the oldest is slow"
        for conn in late:
            limiter.leave(conn)


def test_a_throttle_counts_what_it_holds_back():
    throttle = Throttle(10.0)
    assert throttle.admit(0.0) == 0
    assert [throttle.admit(t) for t in (0.1, 5.0, 9.9)] == [None] * 3
    assert throttle.admit(10.0) == 3
    assert throttle.admit(25.0) == 0

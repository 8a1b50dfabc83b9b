"""Which generation a pod is of and which code it ends with: facts in, decisions out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.lease import supersedes
from launcher.node.decide import (
    AGAIN,
    AGAIN_CHARGED,
    KINDS,
    MOST_IN_A_ROW,
    all_fail,
    all_refuse,
    exit_code,
    generation,
    job_id,
    place,
)
from launcher.render import kinds

CODES = st.one_of(st.none(), st.integers(0, 255))
KIND = st.sampled_from(KINDS)
PERMANENT = range(1, 128)
"""Codes after which a PyTorchJob with restartPolicy ExitCode starts a pod no more."""


@given(KIND, CODES, st.booleans())
def test_a_pod_ends_well_only_where_the_run_is_done(kind, code, stop_asked):
    assert (exit_code(kind, code, stop_asked=stop_asked) == 0) == (code == 0)


@given(KIND, CODES, st.booleans())
def test_a_pod_ends_the_job_badly_only_where_the_job_has_ended_so(kind, code, stop_asked):
    found = exit_code(kind, code, stop_asked=stop_asked)
    if found in PERMANENT:
        assert found in (91, 93, 94)
        assert code in (93, 94) or (stop_asked and code == 91)


@given(KIND, st.booleans(), st.sampled_from([None, 1, 91, 92, 130, 137, 143]))
def test_while_the_job_goes_on_or_may_go_on_every_pod_is_started_again(kind, stop_asked, code):
    if not (stop_asked and code == 91):
        assert exit_code(kind, code, stop_asked=stop_asked) == AGAIN >= 128


@given(CODES, st.booleans())
def test_a_job_set_knows_two_codes_that_end_it(code, stop_asked):
    for kind in ("jobset", "trainjob"):
        assert exit_code(kind, code, stop_asked=stop_asked) in (0, 93, 94, AGAIN)


@given(CODES, st.booleans())
def test_the_rendered_job_charges_no_pod_that_counts_itself_and_drops_none_that_ran(code, stop):
    assert AGAIN == kinds.AGAIN != AGAIN_CHARGED > 127
    ran = exit_code("jobset", code, stop_asked=stop)
    assert not {ran, AGAIN_CHARGED} & set(kinds.NEVER_RAN_CODES)


@pytest.mark.parametrize(("kind", "code"), [("pytorchjob", 91), ("jobset", 93), ("trainjob", 93)])
def test_a_cancelled_run_stays_down(kind, code):
    assert exit_code(kind, 91, stop_asked=True) == code
    assert exit_code(kind, 91, stop_asked=False) == AGAIN


NUMBERS = st.one_of(st.none(), st.integers(0, 99))
OTHERS = st.sampled_from(
    [None, "17.3", "llama-1.8", "llama-10.7", "llama-0", "llama-0.x", "llama-0.-1", "x.llama-0.5"]
)


def name(number: int | None) -> str | None:
    return None if number is None else f"llama-0.{number}"


@given(NUMBERS, NUMBERS)
def test_the_generation_is_the_one_that_lives_or_the_next(live, ended):
    found = generation("llama-0", lease_job=name(live), ended_job=name(ended))
    assert found >= 0
    if live is not None and (ended is None or live > ended):
        assert found == live
    elif ended is not None:
        assert found == ended + 1
        assert supersedes(f"llama-0.{found}", f"llama-0.{ended}")


@given(OTHERS, OTHERS)
def test_jobs_of_others_do_not_count(lease_job, ended_job):
    assert generation("llama-0", lease_job=lease_job, ended_job=ended_job) == 0


def test_an_end_is_never_taken_for_ones_own():
    """Whatever order pods come in, each generation ends once and the next begins."""
    ended = None
    for expected in range(4):
        for lease in (None, name(expected)):
            assert generation("llama-0", lease_job=lease, ended_job=ended) == expected
        ended = name(expected)


def test_the_name_of_a_job():
    assert job_id("llama-3", "2") == "llama-3-2"
    assert job_id("llama", "007") == "llama-7"
    for bad in (("", "0"), ("Llama", "0"), ("llama-", "0"), ("a", ""), ("a", "x"), ("a/b", "0")):
        with pytest.raises(ValueError, match="submission"):
            job_id(*bad)


SUFFIX = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=5, max_size=5)
PODS = st.builds("a-node-0-{}-{}".format, st.integers(0, 5), SUFFIX)


@given(st.dictionaries(PODS, st.integers(0, 255), max_size=9), st.integers(0, 6))
def test_one_pod_s_word_never_ends_the_job(exits, num_nodes):
    assert not all_refuse("jobset", exits, num_nodes, live=True)
    if all_refuse("jobset", exits, num_nodes, live=False):
        assert len({name[:-6] for name in exits}) >= num_nodes >= 1
        assert set(exits.values()) == {93}
    assert all_refuse("pytorchjob", {"a": 93, "b": 93}, 2, live=False)


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 20), max_size=6), st.integers(0, 6))
def test_as_many_pods_as_the_job_needs_must_have_failed_again_and_again(counts, num_nodes):
    often = sum(count >= MOST_IN_A_ROW for count in counts.values())
    assert all_fail(counts, num_nodes) == (0 < num_nodes <= often)


@given(st.sampled_from(["jobset", "trainjob"]), st.integers(0, 2047), SUFFIX, SUFFIX)
def test_a_pod_that_is_made_anew_has_the_same_place(kind, index, one, other):
    name = f"llama-node-0-{index}"
    assert place(kind, f"{name}-{one}") == place(kind, f"{name}-{other}") == name
    assert place(kind, f"llama-node-0-{index + 1}-{one}") != name
    assert place("pytorchjob", f"llama-worker-{index}") == f"llama-worker-{index}"

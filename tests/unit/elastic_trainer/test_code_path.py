from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.worker.fresh_process import CODE, SOURCE, frozen_path, frozen_python_path

ENV = {CODE: "/home/me/proj/runs/r/code/d1", SOURCE: "/home/me/proj"}
COPY = ENV[CODE]


def test_the_source_is_replaced_by_the_copy_and_the_copy_comes_last():
    path = ["/home/me/proj/lib", "", "/usr/lib/python3", "/home/me/project2", "/home/me/proj"]
    assert frozen_path(path, ENV) == [
        *(f"{COPY}/lib", "", "/usr/lib/python3", "/home/me/project2", COPY),
        f"{COPY}/src",
    ]


def test_what_lies_in_the_copy_stays():
    assert frozen_path([f"{COPY}/lib", COPY], ENV) == [f"{COPY}/lib", COPY, f"{COPY}/src"]


def test_pythonpath_is_replaced_and_not_added_to():
    env = {**ENV, "PYTHONPATH": "/home/me/proj:/opt/x"}
    assert frozen_python_path(env) == {"PYTHONPATH": f"{COPY}:/opt/x"}
    assert frozen_python_path(ENV) == {}


@given(st.lists(st.text()))
def test_nothing_frozen_changes_nothing(path):
    assert frozen_path(path, {}) == path
    assert frozen_python_path({"PYTHONPATH": ":".join(path)}) == {}


@given(st.lists(st.sampled_from([COPY, "/home/me/proj", "/home/me/proj/a", "/x", ""])))
def test_doing_it_twice_is_doing_it_once(path):
    once = frozen_path(path, ENV)
    assert frozen_path(once, ENV) == once
    assert not [entry for entry in once if entry in {"/home/me/proj", "/home/me/proj/a"}]

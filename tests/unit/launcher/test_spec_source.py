# ruff: noqa: E501  tables of messages, a row each
from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from problem_lines import has_parts

from launcher.spec.errors import UserError
from launcher.spec.source import (
    MAX_DEPTH,
    MOST_PROBLEMS,
    describe,
    parse_value,
    read_documents,
    read_source,
    write_sets,
)


def refusal(text, sets=()):
    with pytest.raises(UserError) as caught:
        read_source(text, "job.yaml", sets)
    return str(caught.value)


def test_values_are_those_of_yaml_1_2():
    source = read_source(
        "a: 1\nb: 1e-5\nc: yes\nd: 2-00:00:00\ne: 2020-01-01\nf: 0o17\ng: 0x10\nh: 012\n"
        "i: 1_000\nj: ~\nk: true\nl: '3'\nm: .inf\nn: on\no: 12:30:00\np: 1e4\nq: !!str 5\nr: =\ns:\n",
        "job.yaml",
    )
    assert source.data == {
        "a": 1, "b": 1e-5, "c": "yes", "d": "2-00:00:00", "e": "2020-01-01", "f": 15, "g": 16,
        "h": 12, "i": 1000, "j": None, "k": True, "l": "3", "m": math.inf, "n": "on",
        "o": "12:30:00", "p": 1e4, "q": "5", "r": "=", "s": None,
    }  # fmt: skip
    assert source.problems == []


def test_every_key_knows_its_line():
    source = read_source("a: 1\nb:\n  c: {d: 2,\n      e: 3}\n  f: [1,\n      2]\n", "job.yaml")
    lines = {".".join(map(str, path)): line for path, line in source.lines.items()}
    assert lines == {
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.c.d": 3,
        "b.c.e": 4,
        "b.f": 5,
        "b.f.0": 5,
        "b.f.1": 6,
    }
    assert source.where(("b", "c", "missing")).line == 3
    assert source.where(("missing",)).line == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: HF004"),
        ("# nothing\n", "HF004"),
        ("- 1\n", "job.yaml:1: HF005"),
        ("hello\n", "HF005 ... 'hello'"),
        ("a:\n\tb: 1\n", "job.yaml:2: HF003"),
        ("a: [\n", "HF003"),
        ("a: b: c\n", "job.yaml:1: HF003"),
        ("a: \x00\n", "HF003 character 0"),
        ("a: 1\n---\nb: 1\n", "HF007"),
        ("apiVersion: v1\n---\na: 1\n", "HF007 ... Kubernetes"),
        ("apiVersion: v1\nkind: Pod\n", "HF007 ... Kubernetes"),
        ("a: " + "[" * 5000, "HF003"),
        ("a: " + "[" * 500_000 + "]" * 500_000, "HF003"),
        ("- " * 5000, "HF003"),
        ('{"a": "\\ud83d\\ude00"}', "job.yaml:1: HF015"),
        ("a: *x\n", "job.yaml:1: HF003 ... *x"),
        ("a: \ud800\n", "HF003"),
        ("a: &x [*x]\n", "HF007 a[0]:"),
        ("a" * ((1 << 20) + 1), "HF002"),
    ],
)  # fmt: skip
def test_what_is_no_job_file_says_so(text, message):
    assert has_parts([refusal(text)], message)


def test_aliases_do_not_unfold_without_end():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 9):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n"
    assert "HF007" in refusal(bomb)
    long = "x" * 20_000
    assert "HF007" in refusal(f"a: &a {long}\nb: [{'*a, ' * 100}]\n")
    assert "HF007" in refusal(f"a: &a {{? {long} : 1}}\nb: [{'*a, ' * 100}]\n")


@given(
    flow=st.integers(1, 40), aliases=st.integers(1, 80), form=st.sampled_from(["[{}]", "{{k: {}}}"])
)
def test_what_is_nested_by_aliases_is_nested(flow, aliases, form):
    """However the depth comes about: by brackets, and by aliases of what has some."""
    text = "a0: &a0 [1]\n"
    for i in range(1, aliases + 1):
        nested = f"*a{i - 1}"
        for _ in range(flow):
            nested = form.format(nested)
        text += f"a{i}: &a{i} {nested}\n"
    for read in (read_source, read_documents, parse_value):
        if flow * aliases + 2 <= MAX_DEPTH:
            read(text, "job.yaml")
            continue
        with pytest.raises(UserError) as caught:
            read(text, "job.yaml")
        (problem,) = caught.value.problems
        assert problem.code == "HF003"
        assert problem.where.line is not None


def test_many_documents_are_parsed_once(monkeypatch):
    parsed = []
    parse = yaml.parse
    monkeypatch.setattr(
        yaml, "parse", lambda text, **how: parsed.append(text) or parse(text, **how)
    )
    text = "".join(f"---\nkind: a{i}\ntext: |\n  ---x\n" for i in range(300)) + "---\n" * 300
    found = read_documents(text, "m.yaml")
    assert [each.data["kind"] for each in found] == [f"a{i}" for i in range(300)]
    assert [each.lines["kind",] for each in found] == [2 + 4 * i for i in range(300)]
    assert parsed == [text]


def test_documents_together_do_not_unfold_without_end():
    one = f"---\na: &a [{'1,' * 60}]\nb: &b [{'*a,' * 60}]\nc: [{'*b,' * 4}]\n"
    read_documents(one, "m.yaml")
    with pytest.raises(UserError, match="HF007"):
        read_documents(one * 100, "m.yaml")


def test_of_very_many_problems_some_are_told():
    for text in ("a: 1\n" * 9999, "<<: {}\n" * 9999, "a: [" + "!x 1, " * 9999 + "]"):
        assert len(read_source(text, "job.yaml").problems) == MOST_PROBLEMS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2\n", "job.yaml:2: HF006 a: ... line 1"),
        ("a: !!python/object:os.system x\n", "HF007 a: ... tag:yaml.org,2002:python/object"),
        ("a: !foo {b: 1}\n", "HF007 a: ... !foo"),
        ("a: {<<: {b: 1}}\n", "HF007 a:"),
        ("? [a, b]\n: 2\n", "HF007"),
        ("a: !foo [1]\n", "HF007 a: ... !foo"),
        ("a: " + "9" * 5000 + "\n", "HF013 a: '9999"),
        ("a: 0b1\n", "HF013 a: '0b1'"),
    ],
)
def test_smaller_mistakes_are_kept_for_the_report(text, problem):
    assert has_parts(map(str, read_source(text, "job.yaml").problems), problem)


@pytest.mark.parametrize("text", ["_", "-_", "+__", "._", "0o_", "0x_", "0b_", "-._e+1"])
def test_a_number_has_a_digit(text):
    source = read_source(f"a: {text}\n", "job.yaml")
    assert (source.data, source.problems) == ({"a": text}, [])


def test_sets_override_add_and_win_in_order():
    source = read_source("a: {b: 1}\n", "job.yaml", ["a.b=2", "c.d=[1, x]", "a.b=3", "e="])
    assert source.data == {"a": {"b": 3}, "c": {"d": [1, "x"]}, "e": None}
    assert str(source.where(("a", "b")).file) == "--set a.b=3"
    assert source.where(("c", "d")).line is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.b", "--set a.b: HF008 ... section.key=value"),
        ("=1", "HF008 ... section.key=value"),
        ("a..b=1", "HF008 ... section.key=value"),
        ("a.b.c=1", "HF008 a.b ... number 1"),
        ("a.b=[", "HF008"),
        ("a.b=!x 1", "HF008"),
    ],
)
def test_sets_that_cannot_be_applied(text, problem):
    (found,) = read_source("a: {b: 1}\n", "job.yaml", [text]).problems
    assert has_parts([str(found)], problem)


@pytest.mark.parametrize(
    ("text", "sets", "written"),
    [
        ("a: {b: 1} # x\n", ["a.b=2"], "a: {b: 2} # x\n"),
        ("a: {b: 1}\n", ["a.c=x", "a.c=y"], 'a: {c: "y", b: 1}\n'),
        ("a: {}\n", ["a.c=.5"], "a: {c: 0.5}\n"),
        ("a:\n  # why\n  b: 1 # x\n# end\n", ["a.b=2"], "a:\n  # why\n  b: 2 # x\n# end\n"),
        ("a:\n  b: 1\n", ["a.c.d=[1, x]"], 'a:\n  c: {"d": [1, "x"]}\n  b: 1\n'),
        ("a:\n# x\nb: 1\n", ["a.c=2"], 'a: {"c": 2}\n# x\nb: 1\n'),
        ("a:\n  b: 1\n  c: 2\n# x\nd: 3\n", ["a={}"], "a: {}\n# x\nd: 3\n"),
        ("a:\n  b:\n  - 1\n# x\nd: 3\n", ["a.b=2", "d=1"], "a:\n  b: 2\n# x\nd: 1\n"),
        ("é: |\n  😀\n\nb: 1\n", ["é=ü"], 'é: "ü"\n\nb: 1\n'),
        ("a: 1", ["b=2"], "a: 1\nb: 2\n"),
        ("a: &x {b: 1}\nc: *x # y\n", ["c=2"], "a: &x {b: 1}\nc: 2 # y\n"),
        ("a: 1\n", ["b.c=1", "b=2"], "a: 1\nb: 2\n"),
        ("a: &x {b: 1}\nc: *x\n", ["a.b=2"], None),  # c would change, too
    ],
)
def test_sets_are_written_into_the_text(text, sets, written):
    assert write_sets(text, sets) == written


_keys = st.sampled_from(["a", "b", "c d", "é", "#", "1", "on", ""])
_values = (
    st.none() | st.booleans() | st.integers() | st.sampled_from(["x", "- a", "yes", "1.0", "#"])
)


@given(
    st.dictionaries(
        _keys, _values | st.dictionaries(_keys, _values | st.lists(_values)), min_size=1
    ),
    st.lists(st.tuples(st.lists(_keys.filter(bool), min_size=1, max_size=3), _values)),
    st.booleans(),
)
def test_what_is_written_is_what_the_sets_say(data, changes, flow):
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True) + "# end\n"
    sets = [f"{'.'.join(path)}={json.dumps(value)}" for path, value in changes]
    wanted = read_source(text, "job.yaml", sets)
    if any(problem.code == "HF008" for problem in wanted.problems):
        return
    written = write_sets(text, sets)
    if written is not None:
        assert read_source(written, "job.yaml").data == wanted.data
        assert "# end" in written


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    data, problems = None, []
    try:
        data = read_source(text, "job.yaml").data
    except UserError as error:
        problems = error.problems
    assert problems or isinstance(data, dict)


def test_describe_stays_short():
    assert len(describe("x" * 1000)) < 80
    assert len(describe(10**100)) < 80
    assert describe(True).endswith(" true")

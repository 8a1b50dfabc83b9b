from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.command import (
    NAMES,
    Command,
    explain,
    fill,
    split_command,
    unknown_names,
    values_of,
)
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout


@pytest.mark.parametrize(
    ("words", "kind", "target", "args", "fresh"),
    [
        ("train.py", "script", "train.py", (), False),
        ("./run --x -m", "script", "./run", ("--x", "-m"), False),
        ("-m pkg.train {dp}", "module", "pkg.train", ("{dp}",), False),
        ("--fresh --module a", "module", "a", (), True),
        ("--no-python --fresh sh -c x", "command", "sh", ("-c", "x"), True),
        ("--no_python python x.py", "command", "python", ("x.py",), False),
        ("-m torchrun", "module", "torchrun", (), False),
    ],
)
def test_commands_are_taken_apart(
    words: str, kind: str, target: str, args: tuple[str, ...], fresh: bool
) -> None:
    expected = Command(kind=kind, target=target, args=args, fresh=fresh)
    assert split_command(words.split()) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "script"),
        ("-m", "script"),
        ("-m --no-python x", "--no-python: .*-m"),
        ("--nnodes 2 x.py", "--nnodes: .*-m, --no-python and --fresh"),
        ("/usr/bin/python3 x.py", " /usr/bin/python3 "),
        ("torchrun x.py", " torchrun "),
    ],
)
def test_what_is_no_command_says_so(words: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_command(words.split())


VALUES = values_of(
    Rung(num_nodes=12, layout=ParallelLayout(dp=4, tp=2, pp=3), micro_batches=1), "/runs/a"
)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--dp={dp}", "--dp=4"),
        ("{tp}x{pp}x{cp}", "2x3x1"),
        ("{nodes} of {world_size}", "12 of 24"),
        ("{run_dir}/x.pt", "/runs/a/x.pt"),
        ("{{dp}}", "{dp}"),
        ("{{epoch}}.pt", "{epoch}.pt"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ('{"dp": {dp}}', '{"dp": 4}'),
        ("{} {0} {a-b}", "{} {0} {a-b}"),
        ("log.${local_rank}", "log.5"),
        ("${HOME} ${{dp}}", "${HOME} ${{dp}}"),
        ("", ""),
    ],
)
def test_what_is_filled_in(text: str, filled: str) -> None:
    assert fill([text], VALUES, local_rank=5) == (filled,)
    assert unknown_names([text]) == []


def test_unknown_names_are_found_once_and_explained() -> None:
    assert unknown_names(["{dpp}{tp}", "--name={run}", "{dpp}"]) == ["dpp", "run"]
    said = explain("dpp")
    known = ["{dp}", "{tp}", "{pp}", "{cp}", "{nodes}", "{world_size}", "{run_dir}"]
    assert re.findall(r"{+\w+}+", said) == ["{dpp}", *known, "{{dpp}}"]


@given(st.lists(st.sampled_from(["{", "}", "dp", "x", "$", "{{", "}}", " "])).map("".join))
def test_anything_is_either_refused_or_filled(text: str) -> None:
    names = unknown_names([text])
    assert set(names) <= {"x", "xdp", "dpx"} | {n for n in names if set(n) <= set("xdp")}
    if not names:
        (filled,) = fill([text], VALUES)
        if not re.search(r"\{[dpx]+\}", text):  # no name in braces: nothing is to be done
            assert filled == text


@given(
    st.recursive(
        st.integers() | st.booleans() | st.text(alphabet="abc \"{}'"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet="ab"), inner),
        max_leaves=6,
    )
)
def test_json_passes_through_unless_a_text_in_it_is_a_placeholder(value: object) -> None:
    text = json.dumps(value)
    if not unknown_names([text]) and "{{" not in text:
        assert json.loads(fill([text], VALUES)[0]) == value


def test_every_name_has_a_value() -> None:
    assert tuple(VALUES) == NAMES

from __future__ import annotations

import pytest

from elastic_trainer.plan.command import Command, split_command


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
        ("", "found none"),
        ("-m", "found none"),
        ("-m --no-python x", "--no-python: only one of"),
        ("--nnodes 2 x.py", "--nnodes: before the script only -m, --no-python and --fresh"),
        ("/usr/bin/python3 x.py", "leave /usr/bin/python3 out"),
        ("torchrun x.py", "leave torchrun out"),
    ],
)
def test_what_is_no_command_says_so(words: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_command(words.split())

"""Stands in for the programs of a platform: answers from a table, remembers what was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.platforms.commands import CommandResult
from launcher.spec.errors import UserError

Reply = tuple[int, str, str]
"""Exit code, stdout, stderr."""
Said = Reply | Exception | Callable[[Sequence[str]], "Reply | Exception"]


class FakeCommands:
    """Answers by the program's name; several replies come one after the other, the last stays."""

    def __init__(self, replies: Mapping[str, Said | list[Said]]) -> None:
        self.replies = {
            name: list(said) if isinstance(said, list) else [said] for name, said in replies.items()
        }
        self.calls: list[tuple[str, ...]] = []
        self.stdin: list[str] = []

    def run(self, argv, *, timeout_s, stdin=""):
        assert timeout_s > 0
        self.calls.append(tuple(argv))
        self.stdin.append(stdin)
        said = self.replies.get(argv[0])
        if said is None:
            raise UserError("HF650", f"{argv[0]} is not installed here")
        reply = said.pop(0) if len(said) > 1 else said[0]
        if callable(reply):
            reply = reply(argv)
        if isinstance(reply, Exception):
            raise reply
        code, out, err = reply
        return CommandResult(argv=tuple(argv), code=code, out=out, err=err)

    def asked(self, program):
        return [argv for argv in self.calls if argv[0] == program]

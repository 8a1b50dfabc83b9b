"""Control characters of names and texts are shown, never sent to a terminal."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import main as main_module
from launcher.cli.terminal import VisibleStream, direct, for_programs, print_table, visible


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(st.text())
def test_no_control_character_passes(text):
    shown = visible(text)
    assert all(char in "\t\n" or char.isprintable() or ord(char) > 159 for char in shown)
    assert visible(shown) == shown


@given(st.text())
def test_json_stays_the_same_json(text):
    said = json.dumps(text)
    assert json.loads(visible(said)) == text


def test_what_is_escaped_can_be_read():
    assert visible("a\x1b]0;b\x07\r\x9b\u202ec\td\n") == "a\\x1b]0;b\\x07\\x0d\\u009b\\u202ec\td\n"


def test_names_that_are_not_utf8_are_escaped():
    assert visible(os.fsdecode(b"a\xff")) == "a\\udcff"


def test_colours_pass_on_a_terminal_only():
    for stream, shown in ((Terminal(), "\x1b[31mx\\x1b[2J"), (io.StringIO(), "\\x1b[31mx\\x1b[2J")):
        VisibleStream(stream).write("\x1b[31mx\x1b[2J")
        assert stream.getvalue() == shown


def test_scripts_go_to_programs_as_they_are():
    pipe, terminal = VisibleStream(io.StringIO()), VisibleStream(Terminal())
    assert for_programs(pipe) is direct(pipe)
    assert for_programs(terminal) is terminal


def test_commands_print_names_with_control_characters_escaped(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "argv", ["holdfast", "check", "a\x1b]0;b\x07.yaml"])
    monkeypatch.setattr(main_module.gc, "set_threshold", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 2
    assert "a\\x1b]0;b\\x07.yaml" in err.getvalue()
    assert "\x1b" not in out.getvalue() + err.getvalue()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_the_caller_has_closed(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, stream, None)  # as Python has it then
    monkeypatch.setattr(sys, "argv", ["holdfast", "check", "no-such-file.yaml"])
    monkeypatch.setattr(main_module.gc, "set_threshold", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    direct(getattr(sys, stream)).close()
    assert ended.value.code == 2


def test_a_table_shows_names_with_brackets_as_they_are(capsys):
    print_table(("run", "step"), [("a[red]b[/]", "12")], numbers=("step",))
    *_, row = capsys.readouterr().out.rstrip().splitlines()
    assert row.split() == ["a[red]b[/]", "12"]

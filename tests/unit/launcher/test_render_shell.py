from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sbatch_lines import arguments, directives, has_sbatch, real_directives

from launcher.render.shell import (
    Quoted,
    check_path,
    comment,
    file_pattern,
    home_path,
    quoted,
    sbatch_option,
    template,
    words,
)
from launcher.spec.errors import UserError

NASTY = "ab '\"\\$`!#;&|<>(){}[]*?~=%:,\t-é\u2028"
LINES = st.one_of(
    st.text(NASTY, max_size=20),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), max_size=20),
)


@given(st.lists(st.one_of(LINES, st.just("a\nb")), max_size=20))
def test_bash_reads_words_as_they_were(values):
    script = f"printf '%s\\0' {words('start', *values)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=30)
    assert done.stdout.decode().split("\0")[:-1] == ["start", *values]


@given(LINES)
def test_sbatch_reads_an_option_as_it_was(value):
    assert arguments(f" {sbatch_option('comment', value)}") == [f"--comment={value}"]


def test_the_installed_sbatch_reads_lines_as_we_think(tmp_path):
    if not has_sbatch():
        pytest.skip("sbatch is not installed: apt-get install slurm-client")
    values = [*NASTY, NASTY, *(a + b for a in NASTY for b in "'\"\\# x"), "", " ", "x" * 5000]
    lines = [f"#SBATCH {sbatch_option('comment', value)}" for value in values]
    script = "\n".join(["#!/bin/bash", "# first", *lines, "", "true", "#SBATCH --late"])
    wanted = [f"--comment={value}" for value in values]
    assert real_directives(script, tmp_path) == wanted
    assert directives(script) == wanted


def test_plain_values_stay_readable():
    assert sbatch_option("exclude", "node[07,19]") == '--exclude="node[07,19]"'
    assert sbatch_option("time", "2-00:00:00") == "--time=2-00:00:00"
    assert sbatch_option("no-kill") == "--no-kill"
    assert quoted("/shared/a-b_c.d/x=1") == "/shared/a-b_c.d/x=1"
    assert quoted("=ib0") == "'=ib0'"
    assert quoted(7) == "7"


def test_a_home_is_that_of_the_jobs_user():
    assert home_path("~/a b") == "\"$HOME\"/'a b'"
    assert home_path("/a/~/b") == "'/a/~/b'"


def test_a_percent_sign_is_no_replacement():
    assert file_pattern("/a/100%j") == "/a/100%%j"


@pytest.mark.parametrize("path", ["/a\nb", "/a\0", "/a\\b", "/a\x7f", "/a\ud800"])
def test_paths_that_no_script_can_carry_are_refused(path):
    with pytest.raises(UserError, match="HF166"):
        check_path(path, "run directory")


def test_templates_quote_what_they_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.render.shell.TEMPLATES", tmp_path)
    (tmp_path / "own.j2").write_text("a={{ a }} b={{ b }} # {{ c | comment }}\n")
    made = template("own.j2").render(a="$(x)", b=Quoted('"$HOME"'), c="one\ntwo")
    assert made == "a='$(x)' b=\"$HOME\" # one two\n"
    with pytest.raises(Exception, match="'b' is undefined"):
        template("own.j2").render(a=1)
    assert comment("a\n b") == "a b"

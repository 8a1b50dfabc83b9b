"""How sbatch reads the #SBATCH lines of a script, written after src/sbatch/opt.c."""

from __future__ import annotations

import os
import shutil
import subprocess

SLURM_CONF = """\
ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
NodeName=n1
PartitionName=main Nodes=ALL Default=YES
"""
SPACE = " \t\n\v\f\r"


class SbatchError(Exception):
    """sbatch would refuse the line."""


def arguments(line):
    """Return what get_argument makes of the text after #SBATCH."""
    found, at = [], 0
    while True:
        while at < len(line) and line[at] in SPACE:
            at += 1
        if at == len(line):
            return found
        word, quote, escaped, comment = "", "", False, False
        while at < len(line) and (quote or line[at] not in SPACE):
            char = line[at]
            at += 1
            if escaped:
                word, escaped = word + char, False
            elif char == "\\":
                escaped = True
            elif quote:
                word, quote = (word, "") if char == quote else (word + char, quote)
            elif char in "\"'":
                quote = char
            elif char == "#":
                comment = True
                break
            else:
                word += char
        if quote:
            raise SbatchError(line)
        if word or not comment:
            found.append(word)
        if comment:
            return found


def directives(script):
    """Return the options of a script: up to its first line that is a command."""
    found = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            found += arguments(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def real_directives(script, folder):
    """Return what the installed sbatch finds in `script`; nothing is contacted.

    An option that sbatch does not know ends it before it speaks to any controller.
    """
    (folder / "slurm.conf").write_text(SLURM_CONF)
    head, newline, rest = script.partition("\n")
    (folder / "job.sh").write_text(f"{head}{newline}#SBATCH stop-here\n{rest}")
    done = subprocess.run(
        ["sbatch", "-vvv", "--test-only", folder / "job.sh"],
        env={"PATH": os.environ["PATH"], "SLURM_CONF": str(folder / "slurm.conf")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    marker = "sbatch: debug2: Found in script, argument "
    found = [line.removeprefix(marker)[1:-1] for line in done.stderr.split("\n") if marker in line]
    assert found[:1] == ["stop-here"], done.stderr
    return found[1:]


def has_sbatch():
    """Whether Slurm's client is installed."""
    return shutil.which("sbatch") is not None

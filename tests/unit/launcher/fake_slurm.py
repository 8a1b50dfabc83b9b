"""Puts small programs called sbatch, squeue, … on a PATH, which say what a test wants them to."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from launcher.platforms.slurm.parse import expand_nodes

PROGRAMS = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "sacctmgr")
SUBMIT = 1_767_225_600

_PROGRAM = """\
#!/bin/sh
cd {folder}
call="${{0##*/}}"
for word in "$@"; do call="$call $word"; done
printf '%s\\n' "$call" >>calls  # at once: some are asked together
[ -e {name}.then ] && . ./{name}.then
[ -e {name}.err ] && cat {name}.err >&2
[ -e {name}.out ] && cat {name}.out
[ -e {name}.code ] && exit "$(cat {name}.code)"
exit 0
"""


class FakeSlurm:
    """Programs under `folder`/bin that answer from files beside them."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in PROGRAMS:
            path = self.bin / name
            path.write_text(_PROGRAM.format(folder=shlex.quote(str(folder)), name=name))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        self.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.says("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.says("sacct", err="Slurm accounting storage is disabled", code=1)
        self.accepts("17")

    def says(self, name, out="", err="", code=0, then=""):
        """Let `name` answer so from now on; `then` is run by its shell before."""
        for end, text in (("out", out), ("err", err), ("code", str(code)), ("then", then)):
            (self.folder / f"{name}.{end}").write_text(text + "\n" if text else "")

    def accepts(self, job_id):
        """Let sbatch take jobs, and squeue show the last one as waiting."""
        row = r"%s\037%s\037PENDING\037Priority\037%s\037N/A\037N/A\037\037n/a\037a-job\037%s\n"
        then = (
            f'for last in "$@"; do :; done; printf \'{row}\' {job_id} {job_id} {SUBMIT} "$last" '
            ">squeue.out; echo 0 >squeue.code; : >squeue.err"
        )
        self.says("sbatch", out=job_id, then=then)

    def is_now(self, state, reason="None", nodes="n1", start="N/A", batch_host="", **detail):
        """Change what squeue says about the last job, and scontrol where `detail` is given."""
        fields = (self.folder / "squeue.out").read_text().rstrip("\n").split("\x1f")
        fields[2:4], fields[5], fields[7] = [state, reason], str(start), nodes
        fields[8] = batch_host or expand_nodes(nodes)[0] if nodes else "n/a"
        fresh = self.folder / "squeue.fresh"
        fresh.write_text("\x1f".join(fields) + "\n")
        fresh.replace(self.folder / "squeue.out")  # at once: squeue may be asked meanwhile
        if detail:
            known = {"JobId": fields[0], "JobName": "a-job", "JobState": state, "Reason": reason}
            known |= {"SubmitTime": fields[4], "Command": fields[10], "NodeList": nodes} | detail
            self.says("scontrol", " ".join(f"{key}={value}" for key, value in known.items()))

    def calls(self, name=""):
        """Return the command lines so far, of one program or of all."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(name)]


def tree(folder):
    """Return what there is under `folder`, to see that nothing was left behind."""
    return sorted(os.path.relpath(path, folder) for path in Path(folder).rglob("*"))

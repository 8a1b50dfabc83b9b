"""An srun's options, and the program that it starts. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from launcher.spec.errors import NOWHERE, UserError, Where

_WITH_VALUE: Final = {
    "nodes": "N", "ntasks": "n", "ntasks-per-node": "", "nodelist": "w", "exclude": "x",
    "relative": "r", "gpus": "G", "wait": "W", "output": "o", "error": "e", "open-mode": "",
    "gpus-per-task": "", "cpus-per-task": "c", "distribution": "m",
}  # fmt: skip
_ALONE: Final = {"kill-on-bad-exit": "K", "no-kill": "k", "label": "l", "unbuffered": "u"}
_OURS: Final = {
    form: long
    for long, short in (_WITH_VALUE | _ALONE).items()
    for form in (f"--{long}", *([f"-{short}"] if short else []))
}
"""Options of srun that follow from the job, or that each node's own srun is given -> long names."""
_FLAGS: Final = frozenset(
    (
        *("compress", "contiguous", "disable-status", "exact", "exclusive", "help", "hold"),
        *("immediate", "kill-on-bad-exit", "label", "multi-prog", "nice", "no-allocate", "no-kill"),
        *("nvmps", "oom-kill-step", "overcommit", "overlap", "oversubscribe", "preserve-env"),
        *("propagate", "pty", "quiet", "quit-on-interrupt", "reboot", "resv-ports", "send-libs"),
        *("share", "spread-job", "test-only", "unbuffered", "usage", "use-min-nodes", "verbose"),
        *("version", "whole", "x11"),
        # pyxis (github.com/NVIDIA/pyxis, "srun options")
        *("container-mount-home", "no-container-mount-home", "container-remap-root"),
        *("no-container-remap-root", "container-entrypoint", "no-container-entrypoint"),
        *("container-entrypoint-log", "container-writable", "container-readonly"),
    )
)
"""Long options without a value, or with one behind = only (srun --help; slurm_opt.c)."""
_IN_FILE_NAMES: Final = {
    "j": "SLURM_JOB_ID", "x": "SLURM_JOB_NAME", "A": "SLURM_ARRAY_JOB_ID",
    "a": "SLURM_ARRAY_TASK_ID", "u": "SLURM_JOB_USER",
}  # fmt: skip
_FORM: Final = re.compile(r"%(\d*)(.)")
_SHORT_FLAGS: Final = frozenset("EHIKOQVXZhklsuv")
"""Short ones; of I, K and k a value follows at once or not at all."""


def cannot_wrap(message: str, where: Where = NOWHERE) -> NoReturn:
    """Refuse a script, a launch or a manifest (HF169)."""
    raise UserError("HF169", message, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunOptions:
    """An srun's options, taken apart."""

    kept: tuple[str, ...]
    given: Mapping[str, str]
    """Those of _OURS: long name -> value."""

    @property
    def in_container(self) -> bool:
        """Whether pyxis starts its program in a container."""
        return any(option.startswith("--container-") for option in self.kept)

    @property
    def of_task(self) -> dict[str, str]:
        """Return the variables in which srun tells a task what it has been asked for."""
        asked = (name for name in ("gpus-per-task", "cpus-per-task") if name in self.given)
        return {f"SLURM_{name.upper().replace('-', '_')}": self.given[name] for name in asked}

    def check(self) -> None:
        """Refuse what agents cannot be started by.

        Raises:
            UserError: HF169, another way to start programs, or an --export that would hurt.
        """
        for word in self.kept:
            name, _, value = word.partition("=")
            if name in ("--multi-prog", "--het-group", "--pack-group"):
                cannot_wrap(f"srun {name}: its programs cannot replace each other")
            if name == "--pty":
                cannot_wrap("srun --pty: it is somebody's terminal")
            if name == "--export" and "ALL" not in value.split(","):
                cannot_wrap(
                    f"srun --export={value} would keep the job's settings from the agents: write "
                    "ALL first, as in --export=ALL,NAME=value, or leave it out"
                )

    @property
    def num_nodes(self) -> int | None:
        """How many nodes it starts on; None: on all of the job."""
        for name in ("nodes", "ntasks"):
            text = self.given.get(name, "").rpartition("-")[2]
            if text and not (text.isdecimal() and int(text)):
                cannot_wrap(f"srun: --{name}={self.given[name]}: expected a number")
            # Of tasks only a single one says where: more may share a node.
            if text and (name == "nodes" or text == "1"):
                return int(text)
        return None  # not by --nodelist: srun adds to it what SLURM_NNODES asks for

    def hosts(self, of_job: Sequence[str], expand: Callable[[str], Sequence[str]]) -> Sequence[str]:
        """Return the nodes that it starts on, of the job's; `expand` is n[1-3] -> names.

        Raises:
            UserError: HF169, the job does not have them.
        """
        named, without = (
            expand(",".join(self.given[name].split())) if self.given.get(name) else ()
            for name in ("nodelist", "exclude")
        )
        first = int(self.given.get("relative") or 0)
        left = [host for host in of_job[first:] if host not in without]
        count = self.num_nodes or len(left)
        if (foreign := [host for host in named if host not in left]) or count > len(left):
            what = ", ".join(foreign) or f"{count} nodes"
            cannot_wrap(f"srun asks for {what}, and has {', '.join(left)} of the job's")
        others = [host for host in left if host not in named]
        chosen = {*named, *others[: max(0, count - len(named))]}
        return [host for host in left if host in chosen]

    def gpus_per_node(self, num_nodes: int) -> tuple[str, ...]:
        """Return what --gpus, a total, asks of each of `num_nodes`."""
        if (total := self.given.get("gpus")) is None:
            return ()
        kind, colon, count = total.rpartition(":")
        if not count.isdecimal() or int(count) % num_nodes:
            wrong = f"does not divide by {num_nodes} nodes; write --gpus-per-node"
            cannot_wrap(f"srun: --gpus={total} {wrong}")
        return (f"--gpus-per-node={kind}{colon}{int(count) // num_nodes}",)

    def output(self, env: Mapping[str, str]) -> str | None:
        """Return the file of --output for all tasks (man srun, "filename pattern"); None: none."""
        values = {"%": "%"} | {form: env.get(name, "") for form, name in _IN_FILE_NAMES.items()}
        text = self.given.get("output", "all")
        if text in ("all", "none") or not {form for _, form in _FORM.findall(text)} <= {*values}:
            return None
        return _FORM.sub(lambda found: values[found[2]].rjust(int(found[1] or 0), "0"), text)

    def asked(self, num_nodes: int, env: Mapping[str, str]) -> tuple[str, ...]:
        """Return what is asked of each of `num_nodes`, for one task there."""
        return (*self.kept, *self.gpus_per_node(num_nodes), *self.of_tasks(1, env))

    def of_tasks(self, count: int, env: Mapping[str, str]) -> tuple[str, ...]:
        """Return what a task in the place of `count` asks for. `env` is that of the srun."""
        asked = ((what, *self.per_task(what, env)) for what in ("gpus", "cpus"))
        return tuple(
            f"--{what}-per-task={kind}{each * count}"
            for what, kind, each in asked
            # A task like each one before has it from the job.
            if each and (count > 1 or f"{what}-per-task" in self.given)
        )

    def per_task(self, what: str, env: Mapping[str, str]) -> tuple[str, int]:
        """Return the kind, with a colon, and number of `gpus` or `cpus` of a task; 0: not said."""
        name = f"{what.upper()}_PER_TASK"
        of_job = env.get(f"SRUN_{name}") or env.get(f"SLURM_{name}", "")
        kind, colon, count = self.given.get(f"{what}-per-task", of_job).rpartition(":")
        return f"{kind}{colon}", int(count) if count.isdecimal() else 0


def srun_of(argv: Sequence[str]) -> tuple[SrunOptions, tuple[str, ...]]:
    """Take an srun's arguments apart: its options, and the program with its own arguments."""
    kept: list[str] = []
    given: dict[str, str] = {}
    at = 0
    while at < len(argv) and (word := argv[at]).startswith("-"):
        at += 1
        if word == "--":
            break
        for name, value, form in _options(word):
            words = [form]
            if value is None and at < len(argv):
                value = argv[at]  # noqa: PLW2901
                words = [f"{form}={value}"] if form.startswith("--") else [form, value]
                at += 1
            if name in _OURS:
                given[_OURS[name]] = value or ""
            else:
                kept += words
    return SrunOptions(kept=tuple(kept), given=given), tuple(argv[at:])


def _options(word: str) -> list[tuple[str, str | None, str]]:
    """Return the options of a word: name, value, and form; None: the next word is the value."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return [(name, value if equals or name[2:] in _FLAGS else None, word)]
    if set(word[1:]) <= _SHORT_FLAGS:
        return [(f"-{flag}", "", f"-{flag}") for flag in word[1:]]
    return [(word[:2], word[2:] or None, word)]

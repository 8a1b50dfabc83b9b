"""Renders runbooks: of each class in the table of signatures, of procedures, of a run's failure.

A class's page is the table's account of it and what `classes.toml` says an operator does; a
procedure is a template of its own (`runbooks/`). The pages in docs/runbooks have placeholders where
a run's have its names.
"""

from __future__ import annotations

import io
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.signatures import classes
from launcher.spec.errors import UserError

FOLDER: Final = Path(__file__).parent / "runbooks"

_ON_THE_HOST: Final = (
    "kubectl debug node/NODE -it --profile=sysadmin --image=busybox -- chroot /host "
)
_PLACEHOLDER: Final = re.compile(r"\b(?:RUN|JOB|NODE|NAMESPACE|POD)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names in a page's commands; placeholders by default."""

    run: str = "RUN"
    job: str = "JOB"
    node: str = "NODE"
    namespace: str = "NAMESPACE"
    pod: str = "POD"

    def quoted(self) -> Names:
        """Return them as words of a shell."""
        return Names(**{name: shlex.quote(value) for name, value in asdict(self).items()})


@cache
def titles() -> dict[str, str]:
    """Return name -> title of all pages: classes in the table's order, then procedures."""
    found = {name: of.title for name, of in classes().items()}
    for path in sorted(FOLDER.glob("procedures/*.md.j2")):
        head = path.read_text(encoding="utf-8").splitlines()[0]
        found[path.name.removesuffix(".md.j2")] = head.removeprefix("# ")
    return found


def page(name: str, names: Names | None = None) -> str:
    """Return a runbook in Markdown, with `names` in its commands.

    Raises:
        UserError: HF694 no runbook has this name.
    """
    if name not in titles():
        near = ", ".join(each for each in titles() if name.lower() in each) or "see --list"
        raise UserError("HF694", f"no runbook is named {name!r}: {near}")
    filled = (names or Names()).quoted()
    if (of := classes().get(name)) is None:
        return _template(f"procedures/{name}.md.j2").render(names=filled)
    about = _data("classes")[of.name]
    return _template("class.md.j2").render(
        of=of,
        meaning=_data("actions")[of.action]["meaning"],
        done=about.get("done", _data("actions")[of.action]["done"]),
        names=filled,
        **_commands(about, filled),
        **{key: about[key] for key in ("decide", "over", "escalate")},
    )


def runbook_of(run: str, folder: Path, name: str | None) -> tuple[str, str]:
    """Return the name of a runbook and its text, with the run's names filled in.

    Without `name` it is the runbook of the class that the doctor finds.

    Raises:
        UserError: HF694 no runbook has this name, or the run no failure; what keeps the run from
            being read.
    """
    # Late: pages alone need no runs.
    from launcher.doctor.doctor import diagnose
    from launcher.runs.runs import find_run

    found = find_run(run, folder)
    diagnosis = diagnose([str(found.path)], folder, io.BytesIO())
    if name is None:
        name = diagnosis.name
        if name not in classes():
            raise UserError("HF694", f"no failure is found in {run}: name a class or procedure")
    names = {"run": found.shown}
    if found.submission is not None:
        names["job"] = found.submission.job.id
    if diagnosis.node is not None:
        names["node"] = diagnosis.node
    return name, page(name, Names(**names))


def index() -> str:
    """Return the list of all pages, in Markdown."""
    return _template("index.md.j2").render(
        actions=_data("actions"),
        classes=classes().values(),
        procedures={name: title for name, title in titles().items() if name not in classes()},
    )


def _commands(about: Mapping[str, Any], names: Names) -> dict[str, list[str]]:
    """Return what to run on each platform, names filled in."""
    host, inside = about.get("host", []), about.get("inside", [])
    on_slurm = [f"srun --overlap --jobid JOB -w NODE {each}" for each in (*inside, *host)]
    in_pod = [f"kubectl -n NAMESPACE exec POD -- {each}" for each in inside]
    on_node = [_ON_THE_HOST + each for each in host]
    return {
        "slurm": [_filled(each, names) for each in (*about.get("slurm", ()), *on_slurm)],
        "kubernetes": [
            _filled(each, names) for each in (*about.get("kubernetes", ()), *in_pod, *on_node)
        ],
    }


def _filled(command: str, names: Names) -> str:
    """Put the names into a command of the table, whose placeholders are whole words."""
    return _PLACEHOLDER.sub(lambda found: getattr(names, found[0].lower()), command)


@cache
def _data(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def _template(name: str) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER, followlinks=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  not HTML: `Names.quoted` quotes for the shell
    )
    return environment.get_template(name)

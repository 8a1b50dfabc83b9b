"""Named clusters with their defaults, which a job file leaves out.

A file of sites is YAML, in ~/.config/holdfast/sites.yaml or /etc/holdfast/sites.yaml:

    alps:
      target: slurm
      defaults:
        cluster: {gpus_per_node: 4, gpu: A100-80GB-SXM}
        slurm: {account: a-llm, partition: normal}

Each default is a --set that comes before those of the command line, where the job file is silent. A
site with `ssh: HOST` is elsewhere: commands run there (launcher/runs/over_ssh.py).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from elastic_trainer.storage.files import open_regular
from launcher.platforms.targets import target_named
from launcher.spec.errors import UserError, Where
from launcher.spec.site_files import files
from launcher.spec.source import MAX_BYTES, SpecSource, read_source
from launcher.spec.spec import JobSpec, keys_of
from launcher.spec.values import SpecSection

_HOST: Final = r"^[\w][\w.@:/%\[\]-]*$"
_FOLDER: Final = r"^[^~\x00][^\x00]*$"
_PROGRAM: Final = r"^[\w~/.][\w~/.+@-]*$"
"""Without blanks and quotes, so that a shell there reads them unchanged."""
_SET_KEY: Final = re.compile(r"[\w-]+")
"""What a --set takes for one key."""


class Site(SpecSection):
    """A cluster."""

    target: str | None = Field(None, description="slurm, pytorchjob, jobset, trainjob or local.")
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="Sections and keys as in a job file."
    )
    ssh: Annotated[str, Field(pattern=_HOST)] | None = Field(
        None, description="Host, as ssh takes it; none: this machine."
    )
    folder: Annotated[str, Field(pattern=_FOLDER)] = Field(
        "holdfast", description="Folder there, absolute or relative to the home directory."
    )
    holdfast: Annotated[str, Field(pattern=_PROGRAM)] = Field(
        "holdfast", description="The command there, on the PATH or by its path."
    )

    def sets(self, job: Mapping[str, Any]) -> list[str]:
        """Return the defaults that the job does not say itself, as --set takes them. Pure."""
        return list(_missing(self.defaults, job, ""))


def find_site(name: str, env: Mapping[str, str] = os.environ) -> Site:
    """Return the site called `name`; what is wrong with others keeps none from it.

    Raises:
        UserError: HF208 it is unknown; HF209 a file of sites is wrong; HF002 to HF008 it is not
            YAML.
    """
    known: list[str] = []
    for path in files(env):
        source = _read(path)
        if name in source.data:
            return _site(source, name)
        known += source.data
    listed = f"; known are {', '.join(known)}" if known else ""
    places = " or ".join(map(str, files(env)))
    raise UserError("HF208", f"{name} is not a site of {places}{listed}")


def _read(path: Path) -> SpecSource:
    try:
        with open_regular(path) as file:
            # As ssh refuses its own: a site names commands, and hosts that are trusted.
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                message = f"anybody may write it; chmod o-w {path}"
                raise UserError("HF209", message, where=Where(str(path)))
            text = file.read(4 * MAX_BYTES).decode()
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError("HF209", f"cannot be read: {reason}", where=Where(str(path))) from error
    try:
        return read_source(text, str(path))
    except UserError as error:
        if error.code != "HF004":
            raise
        return SpecSource(str(path), {})  # nothing but comments


def _site(source: SpecSource, name: str) -> Site:
    where = source.where((name,))
    here = [each for each in source.problems if f"{each.where.key}.".startswith(f"{name}.")]
    if here:
        raise UserError.many(here)
    try:
        site = Site.model_validate(source.data[name])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError("HF209", f"{key}: {first['msg']}", where=where) from error
    if site.target is not None:
        target_named(site.target)
    if unknown := [key for key in site.defaults if key not in keys_of(JobSpec)]:
        message = f"defaults: {unknown[0]} is not a section of a job file"
        raise UserError("HF209", message, where=where)
    return site


def _missing(defaults: Mapping[str, Any], job: Mapping[str, Any], above: str) -> Iterator[str]:
    if not all(map(_SET_KEY.fullmatch, defaults)):  # as labels of nodes: only the whole can be set
        yield f"{above.removesuffix('.')}={json.dumps(_merged(defaults, job), ensure_ascii=False)}"
        return
    for key, value in defaults.items():
        given = job.get(key)
        if given is None:
            yield f"{above}{key}={json.dumps(value, ensure_ascii=False)}"
        elif isinstance(given, dict) and isinstance(value, dict):
            yield from _missing(value, given, f"{above}{key}.")


def _merged(default: Any, given: Any) -> Any:
    if isinstance(default, dict) and isinstance(given, dict):
        names = {**default, **given}
        return {name: _merged(default.get(name), given.get(name)) for name in names}
    return default if given is None else given

"""Job file -> JobSpec, from disk: the file, the config.json it may name, and `layout: auto`.

Of a config.json that no family here has, transformers is asked.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.storage.files import open_regular, read_regular
from launcher.plan.planning import nothing_fits, speeds_of, unknown_speed
from launcher.plan.search import fastest
from launcher.plan.transformers import ask
from launcher.spec.errors import UserError, Where
from launcher.spec.reading import parse_spec
from launcher.spec.source import MAX_BYTES, read_source
from launcher.spec.spec import JobSpec

if TYPE_CHECKING:
    from launcher.platforms.sites import Site
    from launcher.spec.profile import Profile

MAX_MODEL_BYTES: Final = 16 << 20
"""Of a model's config.json, which is a page of text."""


def load_spec(
    job: str | Path | Mapping[str, Any] | JobSpec,
    sets: Sequence[str] = (),
    *,
    site: Site | None = None,
    folder: Path | None = None,
) -> JobSpec:
    """Read a job.

    Args:
        job: path of a job file, its values as plain data, or a job that was read before.
        sets: overrides as `train.steps=50`, later ones winning.
        site: the cluster, whose defaults count where the job says nothing. Of one over SSH
            neither the profile is read nor a layout chosen: that is done there.
        folder: base of relative paths in it; None: the folder of the job file, or the working
            directory.

    Raises:
        UserError: HF001 or HF002 when it cannot be read, HF005 when it is not plain data; HF131 or
            HF136 when `layout: auto` finds none; else as `parse_spec`.
    """
    if isinstance(job, JobSpec):
        text, file, before, base_dir = job.text, job.source.file, job.sets, job.folder
    elif isinstance(job, Mapping):
        text, file, before, base_dir = _json(job), "job", (), Path.cwd()
    else:
        text, file, before, base_dir = _text(job), str(job), (), Path(job).absolute().parent
    base_dir = folder or base_dir

    def read(name: str) -> str:
        """Read the config.json of a model, given itself or by its folder."""
        try:
            model_path = base_dir / Path(name).expanduser()
        except RuntimeError as error:  # ~name of somebody who is not known here
            raise FileNotFoundError(str(error)) from error
        if model_path.is_dir():
            model_path /= "config.json"
        return read_regular(model_path, MAX_MODEL_BYTES).decode()

    defaults = [] if site is None else site.sets(read_source(text, file, before).data)
    every = [*before, *defaults, *sets]
    spec = parse_spec(text, file, every, read=read, ask=ask)
    spec.remember(folder=base_dir)
    if site is not None and site.ssh is not None:
        return spec  # it is read again there, where the profile lies
    profile = _profile(spec)
    spec.remember(profile=profile)
    if spec.layout_is_auto:
        asked = [at for at, each in enumerate(every) if each.partition("=")[0].strip() == "layout"]
        at = asked[-1] if asked else 0
        every[at : at + len(asked[-1:])] = [f"layout={_fastest(spec)}"]
        spec = parse_spec(text, file, every, read=read, ask=ask)
        spec.remember(layout_was_auto=True)
    spec.remember(folder=base_dir, profile=profile)
    return spec


def _profile(spec: JobSpec) -> Profile | None:
    """Return the profile that a job names; of a script nothing is predicted.

    Raises:
        UserError: as `find_profile`; HF138 it is of another GPU.
    """
    if spec.cluster.profile is None or spec.command is not None:
        return None
    from launcher.spec.profile import find_profile  # most jobs name none

    key, gpu = "cluster.profile", spec.cluster.gpu
    try:
        profile = find_profile(spec.cluster.profile)
    except UserError as error:
        [found] = error.problems
        message = ": ".join(filter(None, (found.where.file, found.message)))
        raise UserError.many([spec.problem(found.code, key, message)]) from error
    if profile.gpu != gpu:
        message = f"{spec.cluster.profile} is of {profile.gpu}, the job's GPU is {gpu}"
        raise UserError.many([spec.problem("HF138", key, message, {key: None})])
    return profile


def _fastest(spec: JobSpec) -> str:
    """Return the section of the fastest layout that fits the job's GPUs, as JSON.

    Raises:
        UserError: HF131 none fits; HF136 the speed of layouts is not known.
    """
    speeds, facts = speeds_of(spec), spec.facts
    if speeds is None:
        raise UserError.many([unknown_speed(spec)])
    if found := fastest(facts, speeds):
        return json.dumps(found[0].settings()["layout"])
    others = [each.settings() for each in fastest(facts, speeds, of_training=True)]
    offers = [{key: each[key] for key in each if key != "layout"} for each in others]
    raise UserError.many([nothing_fits(spec, *offers)])


def _text(path: str | Path) -> str:
    file = str(path)
    try:
        return job_text(Path(path))
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8; save the file as UTF-8 text"
        raise UserError("HF002", message, where=Where(file)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be read: {reason}; check the path"
        raise UserError("HF001", message, where=Where(file)) from error


def _json(values: Mapping[str, Any]) -> str:
    """Return values as JSON, which is YAML that no text needs quotes for."""
    try:
        return json.dumps(dict(values), ensure_ascii=False, indent=1, allow_nan=False, default=_str)
    except (TypeError, ValueError) as error:
        raise UserError("HF005", f"{error}; a job is made of plain data") from error


def _str(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def job_text(path: Path) -> str:
    """Return the text of a job file, cut behind what a job file may have."""
    if path.parts[:2] in (("/", "dev"), ("/", "proc")):  # a shell's <(...), or its input
        with path.open("rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
                raise OSError(errno.EINVAL, "not a regular file")
            raw = file.read(4 * MAX_BYTES + 1)
    else:
        with open_regular(path) as file:
            raw = file.read(4 * MAX_BYTES + 1)
    return codecs.decode(raw, "utf-8-sig")

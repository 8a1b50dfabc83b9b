"""Profiles: what `holdfast calibrate` has measured on nodes, as files beside those of sites.

A profile is JSON, one record a line; docs/calibrate.md has its fields. launcher/plan/calibrated.py
makes of it what predictions take.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.measured import Found, by_size
from elastic_trainer.storage.files import read_regular
from elastic_trainer.storage.typed import Unix, build, parse_json
from launcher.spec.errors import UserError, Where
from launcher.spec.site_files import profile_folders

VERSION: Final = 1
"""Of the format; a reader takes its own."""
NAME: Final = re.compile(r"\w[\w.+-]{0,99}")
_MAX_BYTES: Final = 1 << 20
_MOST: Final = 1e13
"""More than any size, count, or time since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the nodes of a cluster do."""

    v: int = VERSION
    gpu: str
    """As in `cluster.gpu`."""
    gpus_per_node: int
    nodes: int
    """On which it was measured: 1 or 2."""
    compiled: bool
    """Layers were compiled, as with train.compile."""
    measured_at: Unix
    found: Found = field(default_factory=Found)


def profile_text(profile: Profile) -> str:
    """Return the file's text: JSON, one record a line."""
    raw = asdict(profile)
    found = raw.pop("found")
    lists = {key: value for key, value in found.items() if isinstance(value, tuple)}
    plain = {key: value for key, value in found.items() if key not in lists}
    rows = [f'  "{key}": {json.dumps(value)}' for key, value in _short(plain).items()]
    for key, records in lists.items():
        inside = ",\n".join(f"   {json.dumps(_short(record))}" for record in records)
        rows.append(f'  "{key}": [\n{inside}\n  ]' if records else f'  "{key}": []')
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in raw.items())
    return f'{{\n{head} "found": {{\n' + ",\n".join(rows) + "\n }\n}\n"


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with four digits of each time, which are more than repeats agree in."""
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in record.items()
    }


def parse_profile(text: str | bytes, file: str) -> Profile:
    """Read a profile.

    Raises:
        UserError: HF214 it is none, or one of another version.
    """
    where = Where(file)
    try:
        raw = parse_json(text)
        version = raw.get("v") if isinstance(raw, dict) else None
        if isinstance(version, int) and version != VERSION:
            message = f"version {version}, this holdfast reads {VERSION}; calibrate again"
            raise UserError("HF214", message, where=where)
        profile = build(Profile, raw)
        _check(profile)
    except ValueError as error:
        message = f"not a profile: {error}; make it by `holdfast calibrate`"
        raise UserError("HF214", message, where=where) from error
    return profile


def _check(profile: Profile) -> None:
    """Refuse what nothing can be computed from.

    Raises:
        ValueError: names what is missing or out of range.
    """
    found = profile.found
    for name, value in _numbers(asdict(profile)):
        if not 0 < value < _MOST:
            raise ValueError(f"{name} is {value}, not between 0 and {_MOST:g}")
    if found.launch_s is None:
        raise ValueError("found.launch_s is missing")
    if not any(each.to == "device" for each in found.copies):
        raise ValueError("found.copies has none within a device")
    if any(each.ranks < 2 for each in found.transfers):
        raise ValueError("found.transfers has one of a single rank")
    _check_steps(found)


def _check_steps(found: Found) -> None:
    precisions = {each.precision for each in found.steps}
    for name in ("products", "attention"):
        if len(precisions) != 1 or not precisions <= {e.precision for e in getattr(found, name)}:
            raise ValueError(f"found.{name} and found.steps have no precision in common")
    layouts = {each.layout: ParallelLayout.parse(each.layout) for each in found.steps}
    if ParallelLayout() not in layouts.values():
        raise ValueError("found.steps has none of one rank")
    for layout in layouts:
        few, many = [*by_size(found.steps, layout), None, None][:2]
        if few is None or many is None or few.num_layers == many.num_layers:
            raise ValueError(f"found.steps has not two depths of {layout}")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{name}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def find_profile(name: str, env: Mapping[str, str] = os.environ) -> Profile:
    """Return the profile called `name`, of the first folder that has it.

    Raises:
        UserError: HF213 there is none; HF214 it cannot be read, or is none.
    """
    folders = profile_folders(env)
    if NAME.fullmatch(name):
        for folder in folders:
            path = folder / f"{name}.json"
            try:
                return parse_profile(read_regular(path, _MAX_BYTES), str(path))
            except FileNotFoundError:
                continue
            except OSError as error:
                message = f"cannot be read: {error.strerror or error}"
                raise UserError("HF214", message, where=Where(str(path))) from error
    known = sorted({path.stem for folder in folders for path in _profiles(folder)})
    listed = f"known are {', '.join(known)}" if known else "none is there"
    places = " or ".join(map(str, folders))
    raise UserError("HF213", f"{name} is not a profile in {places}; {listed}: holdfast calibrate")


def _profiles(folder: Path) -> list[Path]:
    try:
        return list(folder.glob("*.json"))
    except OSError:
        return []

"""What is asked before a bundle is submitted: of this machine, the platform, the fleet's ledger."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_trainer.plan.command import split_command
from elastic_trainer.plan.config import DataSection
from elastic_trainer.storage.examine import examine, told_of
from elastic_trainer.storage.files import MEGATRON_PAIR, megatron_prefixes
from elastic_trainer.storage.model_files import examine_tokenizer
from launcher.fleet.node_ledger import NodeLedger
from launcher.fleet.rules import Standing, kept_off, standings
from launcher.platforms.base import Backend, Machines
from launcher.record.failures import ExcludedMachine
from launcher.render.local import Bundle, resolve
from launcher.spec.errors import NOWHERE, Problem, UserError, advice
from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Which machines a submission does without, and warnings."""

    without: tuple[ExcludedMachine, ...]
    warnings: tuple[Problem, ...]

    @property
    def hosts(self) -> list[str]:
        """Names of the machines that it does without."""
        return [each.host for each in self.without]


def ask(
    backend: Backend,
    files: Bundle,
    *,
    spec: JobSpec | None,
    without: Sequence[str] = (),
    force: bool = False,
) -> tuple[Problem, ...]:
    """Ask the platform about a bundle that is to be submitted; return warnings.

    Problems name the lines of `spec`, if given. The job does not use the nodes `without`. With
    `force` errors are warnings.

    Raises:
        UserError: everything that keeps the bundle from ever running there.
    """
    found = backend.find_problems(files, without=without)
    if spec is not None:
        found = [spec.problem(each.code, each.where.key, each.message) for each in found]
    if force:
        found = [replace(each, overruled=True) for each in found]
    warnings = [problem for problem in found if problem.is_warning]
    if errors := [
        replace(problem, message=f"{problem.message}; if this is wrong: submit --force")
        for problem in found
        if not problem.is_warning
    ]:
        raise UserError.many(errors, warnings)
    return tuple(warnings)


def ask_with_ledger(
    backend: Backend,
    files: Bundle,
    *,
    spec: JobSpec | None,
    ledger: NodeLedger | None,
    needed: int,
    excluded: Sequence[ExcludedMachine] = (),
    force: bool = False,
    wall: Callable[[], float] = time.time,
) -> Admission:
    """Ask as `ask` does, for a job that is kept off bad machines.

    Bad are the machines that the run itself has `excluded` and those of the `ledger`; without a
    ledger all others may be used. Where fewer than `needed` would be left, only operators'
    exclusions count, and there is a warning.

    Raises:
        UserError: as `ask`.
    """
    known = {each.host for each in excluded}
    chosen: list[Standing] = []
    warnings: list[Problem] = []
    if ledger is not None and isinstance(backend, Machines):
        with _warned(warnings, "the fleet's ledger is not used"):
            held = _kept_off(backend, files, ledger, needed=needed, now_unix=wall())
            chosen = [each for each in held if each.machine not in known]
            warnings += [_warning("HF189", said) for said in ledger.trouble]

    def answer(standings: Sequence[Standing]) -> Admission:
        more = [
            ExcludedMachine(host=each.machine, member=each.machine, reason=each.reason)
            for each in standings
        ]
        without = tuple(sorted([*excluded, *more], key=lambda each: each.host))
        hosts = [each.host for each in without]
        said = ask(backend, files, spec=spec, without=hosts, force=force)
        listed = [_warning("HF188", f"without {each}, by the fleet's ledger") for each in more]
        return Admission(without=without, warnings=(*said, *warnings, *listed))

    try:
        return answer(chosen)
    except UserError:
        least = [each for each in chosen if each.by_operator]
        if least == chosen:
            raise
        found = answer(least)
    names = ", ".join(each.machine for each in chosen if not each.by_operator)
    said = f"{names}: bad by the fleet's ledger, but without them too few are left; they are used"
    return replace(found, warnings=(*found.warnings, _warning("HF189", said)))


def prepare_ledger(ledger: NodeLedger) -> tuple[Problem, ...]:
    """Make the ledger's ConfigMap if it is missing; return why runs cannot write the ledger."""
    warnings: list[Problem] = []
    with _warned(warnings, "runs cannot write the fleet's ledger"):
        ledger.prepare()
    return tuple(warnings)


def _kept_off(
    backend: Machines, files: Bundle, ledger: NodeLedger, *, needed: int, now_unix: float
) -> list[Standing]:
    held = standings(ledger.entries(), now_unix)
    if not any(each.is_out for each in held.values()):
        return []  # the platform need not say which machines it has
    return kept_off(held, [machine.name for machine in backend.machines(files)], needed)


def _warned(warnings: list[Problem], loss: str) -> AbstractContextManager[None]:
    return advice(loss, lambda text: warnings.append(_warning("HF189", text)))


def _warning(code: str, message: str) -> Problem:
    return Problem(code=code, message=message, where=NOWHERE)


def live_problems(spec: JobSpec, base_dir: str | Path) -> list[Problem]:
    """Return what keeps a job with relative paths in `base_dir` from running on this machine.

    Warnings are among it.
    """
    return [*_data(spec, base_dir), *_checkpoints(spec, base_dir), *_script(spec, base_dir)]


def check_live(spec: JobSpec, base_dir: str | Path) -> list[Problem]:
    """Return what of `live_problems` does not keep the job from running.

    Raises:
        UserError: what does.
    """
    found = live_problems(spec, base_dir)
    if problems := [each for each in found if not each.is_warning]:
        raise UserError.many(problems)
    return found


def _data(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    for key, written in spec.data_paths.items():
        path = Path(resolve(written, base_dir))
        if key == "data.tokenizer":
            found = [wrong] if (wrong := _unreadable(path)) else _of_tokenizer(spec, path)
        else:
            found = _of_corpus(spec, spec.corpora[key], path)
        for code, message in found:
            yield spec.problem(code, key, told_of(key, message))


def _of_tokenizer(spec: JobSpec, path: Path) -> list[tuple[str, str]]:
    """Return (code, message) of what is wrong in the tokenizer."""
    if spec.command is not None:
        return []
    try:
        return examine_tokenizer(path, spec.shape.vocab_size)
    except OSError as error:
        return [("HF202", f"{error.filename or path} cannot be read: {error.strerror}")]


def _of_corpus(spec: JobSpec, corpus: DataSection, path: Path) -> list[tuple[str, str]]:
    """Return (code, message) if a corpus cannot be read, or samples are not what is said."""
    bad_corpus = _bad_pair if corpus.format == "megatron" else _bad_corpus
    wrong = bad_corpus(path)
    if wrong is None and spec.command is None:
        wrong = _content(corpus, path, spec.shape.vocab_size)
    return [wrong] if wrong else []


def _content(data: DataSection, path: Path, vocab_size: int) -> tuple[str, str] | None:
    """Return (code, message) if samples of the corpus are not what data.format says."""
    try:
        return examine(
            path,
            data.format,
            vocab_size=vocab_size,
            key=data.text_key,
            as_is=data.as_is,
        )
    except OSError as error:
        return "HF202", f"{error.filename or path} cannot be read: {error.strerror}"


def _bad_corpus(path: Path) -> tuple[str, str] | None:
    """Return (code, message) unless `path` is a file or folder with something in it."""
    problem = _unreadable(path)
    if problem:
        return problem
    if path.is_dir() and next(path.iterdir(), None) is None:
        return "HF203", f"{path} is empty; put the corpus there"
    if path.is_file() and path.stat().st_size == 0:
        return "HF203", f"{path} is an empty file"
    return None


def _bad_pair(path: Path) -> tuple[str, str] | None:
    """Return (code, message) unless `path` names one Megatron dataset with something in it."""
    try:
        found = megatron_prefixes(path)
    except OSError as error:
        return "HF202", f"{path} cannot be looked at: {error.strerror}"
    if len(found) != 1:
        names = ", ".join(each.name for each in found[:4]) or "none"
        return "HF203", (
            f"{path} holds {len(found)} Megatron datasets ({names}), a folder must hold one "
            "pair of .bin and .idx; name one by its prefix"
        )
    files = [Path(f"{found[0]}{suffix}") for suffix in MEGATRON_PAIR]
    missing = [file for file in files if not file.is_file()]
    if missing:
        absent = " and ".join(map(str, missing)) + (" does" if len(missing) == 1 else " do")
        return "HF201", f"{absent} not exist; a Megatron dataset has a .bin and an .idx"
    return _bad_corpus(files[0]) or _bad_corpus(files[1])


def _unreadable(path: Path) -> tuple[str, str] | None:
    """Return (code, message) unless `path` can be read."""
    try:
        if not path.exists():
            return "HF201", f"{path} does not exist; create it, or fix the path"
    except OSError as error:  # a parent that may not be searched, a name too long
        return "HF202", f"{path} cannot be looked at: {error.strerror}"
    if not (path.is_dir() or path.is_file()):
        return "HF202", f"{path} is neither a file nor a folder; name one of the two"
    wanted = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
    if not os.access(path, wanted):
        return "HF202", f"{path} cannot be read; grant the permission"
    return None


def _checkpoints(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    """Yield a problem when the folder, or the nearest one above it, cannot be written."""
    if spec.checkpoint.dir is None:
        return
    path = Path(resolve(spec.checkpoint.dir, base_dir))
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        message = f"{nearest} is not a folder, so {path} cannot be made; choose another"
        yield spec.problem("HF204", "checkpoint.dir", message)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        message = f"{nearest} cannot be written; choose another, or grant the permission"
        yield spec.problem("HF204", "checkpoint.dir", message)


def _script(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    """Yield a problem when the script or the executable of `command` is not there."""
    if spec.command is None:
        return
    folder, command = Path(resolve(spec.code.dir, base_dir)), split_command(spec.command)
    path = folder / command.target
    if not folder.is_dir():
        message = f"{folder} is not a folder; fix the path, the command runs in it"
        yield spec.problem("HF201", "code.dir", message)
    elif command.kind == "script":
        problem = _unreadable(path)
        if path.is_dir():
            problem = ("HF201", f"{path} is a folder; name the script")
        if problem:
            yield spec.problem(problem[0], "command", problem[1])
    elif command.kind == "command":
        name = str(path) if "/" in command.target else command.target
        if shutil.which(name) is None:
            message = f"{name} is not an executable here; fix the name, or leave --no-python out"
            yield spec.problem("HF201", "command", message)

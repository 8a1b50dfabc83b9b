"""The run directory on the launcher's side: making it, who may use it, what is refused.

`slurm.umask` and `slurm.group` of the job file say who may read a run. The launcher sets the umask
while it writes, and so for sbatch, which hands it on to the job; the script sets it again. The
group is that of the run directory, which hands it on to all that is made in it (the set-group-ID
bit). Nothing needs root, and nothing run as root reads a run: storage may squash root.
"""

from __future__ import annotations

import dataclasses
import grp
import json
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.storage.files import (
    check_output,
    open_regular,
    publish,
    read_regular,
    write_atomic,
)
from elastic_trainer.storage.storage_probe import StorageError, probe_storage
from launcher.platforms.background import MARK, Mark, read_mark
from launcher.record.files import present_record
from launcher.record.status import TrainingStatus
from launcher.spec.errors import UserError, Where, writing

JOB_JSON = "job.json"
AGENTS_SCRIPT = "agents.sh"
"""A wrapped batch script reads it in place of its srun."""
RENDERED = "job.rendered.json"
"""job.json as rendered; job.json itself is narrowed to the nodes of the attempt."""


def create(run_dir: Path, files: Mapping[str, str]) -> None:
    """Make `run_dir` and write the rendered bundle into it.

    Raises:
        UserError: HF611 it exists and is not empty; HF612 it cannot be made or
            written; HF616 other users can change it.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        if not (run_dir / JOB_JSON).is_file():
            raise UserError(
                "HF611", f"run directory {run_dir} exists and is not empty; use another --run-dir"
            )
        command = "submit" if (run_dir / "submitted.json").exists() else "run"
        raise UserError(
            "HF611",
            f"run directory {run_dir} exists already; to resume it use holdfast {command} "
            f"--resume {run_dir}, else another --run-dir",
        )
    check_run_dir(run_dir)
    with writing(f"run directory {run_dir}", "use another --run-dir"):
        run_dir.mkdir(parents=True, exist_ok=True)
    check_run_dir(run_dir)  # again: the umask may let others in
    write_files(run_dir, files)
    with writing(f"run directory {run_dir}", "use another --run-dir"):
        for name in ("events", "logs", "ledger", "board", "cache"):
            (run_dir / name).mkdir(exist_ok=True)


def write_files(run_dir: Path, files: Mapping[str, str]) -> None:
    """Write files of a new run, each whole: others look at the run from now on.

    Raises:
        UserError: HF612 one cannot be written.
    """
    with writing(f"run directory {run_dir}", "use another --run-dir"):
        for name, text in files.items():
            path = run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)


def check_storage(run_dir: Path, *, is_data: bool = False) -> None:
    """See that the file system of a run directory can hold a run; `is_data`: see `probe_storage`.

    Raises:
        UserError: HF617 it lacks something.
    """
    try:
        probe_storage(run_dir, is_data=is_data)
    except StorageError as error:
        raise UserError(error.code, str(error).removeprefix(f"{error.code} ")) from error


def write_bundle(run_dir: Path, bundle: Mapping[str, str]) -> None:
    """Write `bundle` into `run_dir`, over an earlier one, and make `logs`, as Slurm wants it.

    Raises:
        UserError: HF611 a run has begun there; HF612 it cannot be written; HF616 other users can
            change it.
    """
    from launcher.render.local import HEAD, JOB_FILE  # 0.1 s, which readers need not spend

    begun = [name for name in ("board", "events", "submitted.json") if (run_dir / name).exists()]
    if begun:
        raise UserError(
            "HF611",
            f"{run_dir} is the directory of a run that has begun (it has {begun[0]}); use another",
        )
    job_file = run_dir / JOB_FILE
    if JOB_FILE in bundle and job_file.is_file():
        with open_regular(job_file) as file:
            if file.read(len(HEAD)) != HEAD.encode():
                raise UserError("HF611", f"{job_file} would be written over; use another folder")
    check_run_dir(run_dir)
    for name in bundle:
        with writing(run_dir / name, "remove it, or use another folder"):
            check_output(run_dir / name)
    with writing(run_dir, "use another"):
        for folder in {run_dir, *((run_dir / name).parent for name in bundle)}:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in bundle.items():
            write_atomic(run_dir / name, text)


def load(run_dir: Path) -> TrainConfig:
    """Read the job of an existing run, as rendered.

    Raises:
        UserError: HF613 not a run directory, or written by another version.
    """
    rendered = run_dir / RENDERED
    path = rendered if rendered.is_file() else run_dir / JOB_JSON
    if not path.exists():
        fix = (
            f"it holds imported weights; start with them: holdfast run JOB --from {run_dir}"
            if (run_dir / "board").is_dir()
            else f"it has no {JOB_JSON}; see ./runs"
        )
        raise UserError("HF613", f"{run_dir} is not a run directory: {fix}")
    return read_job(path)


def read_job(path: Path) -> TrainConfig:
    """Read a job.json.

    Raises:
        UserError: HF613 it cannot be read, or was written by another version.
    """
    try:
        return TrainConfig.from_json(read_regular(path).decode())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def read_training(run_dir: Path) -> TrainingStatus:
    """Return the state of a run's training, from its record.

    Raises:
        UserError: HF613 its job.json or its record cannot be read.
    """
    return TrainingStatus(load(run_dir), present_record(run_dir).poll())


def narrow(config: TrainConfig, num_nodes: int) -> TrainConfig:
    """Return `config` with the rungs that `num_nodes` nodes can run: no epoch waits for more.

    Raises:
        UserError: HF614 no rung is small enough.
    """
    rungs = tuple(rung for rung in config.ladder.rungs if rung.num_nodes <= num_nodes)
    if not rungs:
        raise UserError(
            "HF614",
            f"--nodes {num_nodes}: the smallest layout of {config.name} needs "
            f"{config.ladder.min_nodes} nodes; use as many, or lower elastic.min_nodes",
        )
    return dataclasses.replace(config, ladder=Ladder(rungs))


def write_attempt(run_dir: Path, rendered: TrainConfig, narrowed: TrainConfig) -> int:
    """Write job.json for the next attempt and return the attempt's number, from 1.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    with writing(f"run directory {run_dir}"):
        write_atomic(run_dir / RENDERED, rendered.to_json())
        write_atomic(run_dir / JOB_JSON, narrowed.to_json())
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        attempts = [int(path.name) for path in logs.iterdir() if path.name.isdecimal()]
        attempt = max(attempts, default=0) + 1
        (logs / str(attempt)).mkdir()
    return attempt


@contextmanager
def live_mark(run_dir: Path, job_id: str) -> Iterator[None]:
    """Say meanwhile that a launcher on this machine runs `run_dir`: `launcher.json` with its pid.

    A quick check before anything starts; the board's lease is what really keeps a second job out,
    also from other machines. The mark of a launcher that was killed is taken over.

    Raises:
        UserError: HF615 a live launcher has put its own.
    """
    path = run_dir / MARK
    mine = json.dumps(dataclasses.asdict(Mark.of_this_process(job_id))).encode()
    if not publish(path, mine):
        refuse_if_live(run_dir)
        path.unlink(missing_ok=True)
        if not publish(path, mine):
            refuse_if_live(run_dir)
            raise UserError("HF615", f"another launcher has just started on {run_dir}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def refuse_if_live(run_dir: Path) -> None:
    """Check that no launcher on this machine runs `run_dir`.

    Raises:
        UserError: HF615 one does; it is named.
    """
    mark = read_mark(run_dir)
    if mark is not None and mark.is_here and mark.lives:
        raise UserError(
            "HF615",
            f"{run_dir} has a live job already: {mark.job} (process {mark.pid}); "
            "stop it first, or start another run",
        )


def check_group(name: str) -> int:
    """Return the id of group `name`, to which this user can give files.

    Raises:
        UserError: HF643 it does not exist, or the user is not in it.
    """
    where = Where(key="slurm.group")
    try:
        gid = grp.getgrnam(name).gr_gid
    except KeyError:
        message = f"group {name} does not exist on this machine; fix the name"
        raise UserError("HF643", message, where=where) from None
    mine = {os.getegid(), *os.getgroups()}
    if gid not in mine and os.geteuid() != 0:
        names = ", ".join(sorted(_name(grp.getgrgid, each) for each in mine))
        user = _name(pwd.getpwuid, os.geteuid())
        message = f"{user} is not in group {name}; use one of {names}"
        raise UserError("HF643", message, where=where)
    return gid


@contextmanager
def umask(text: str | None) -> Iterator[None]:
    """Write files meanwhile under umask `text`, octal digits, in the whole process."""
    if text is None:
        yield
        return
    before = os.umask(int(text, 8))
    try:
        yield
    finally:
        os.umask(before)


def umask_of(run_dir: Path) -> str:
    """Return the umask that a run directory was made under."""
    return f"{0o777 & ~stat.S_IMODE(run_dir.stat().st_mode):04o}"


def check_run_dir(run_dir: Path) -> None:
    """See that only this user, and the groups it is shared with, can change a run directory.

    Whoever can write into it or replace it runs code as this user. A folder above it that others
    may write must have the sticky bit, as /tmp has.

    Raises:
        UserError: HF616 others can; nothing was changed.
    """
    fix = "use another --run-dir"
    if run_dir.exists():
        found = run_dir.stat()
        if found.st_uid != os.geteuid():
            raise UserError(
                "HF616",
                f"run directory {run_dir} belongs to user {found.st_uid}, this is user "
                f"{os.geteuid()}, and its owner can change code and checkpoints; {fix}",
            )
        if found.st_mode & stat.S_IWOTH:
            raise UserError(
                "HF616",
                f"run directory {run_dir} has mode {stat.S_IMODE(found.st_mode):04o}: every user "
                f"can change code and checkpoints; chmod o-w {run_dir}, and use an umask (or "
                f"slurm.umask) as 0022",
            )
    for folder in dict.fromkeys((*run_dir.absolute().parents, *run_dir.resolve().parents)):
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                "HF616",
                f"run directory {run_dir}: every user can put another in its place, since {folder} "
                f"has mode {stat.S_IMODE(mode):04o}; chmod o-w {folder} (or +t), or {fix}",
            )


def make_run_dir(run_dir: Path, *, group: str | None) -> None:
    """Make a run directory that hands on `group` to all that will be made in it.

    Raises:
        UserError: HF643 the group cannot be used; HF612 the folder cannot be made.
    """
    gid = None if group is None else check_group(group)
    with writing(f"run directory {run_dir}", "use another --run-dir"):
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            return  # it is in use already: `create` refuses it
        run_dir.mkdir(parents=True, exist_ok=True)
        if gid is not None:
            os.chown(run_dir, -1, gid)
            run_dir.chmod(stat.S_IMODE(run_dir.stat().st_mode) | stat.S_ISGID)


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or group, or the number of one without a name."""
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)

"""What is asked before a bundle is submitted: of the platform, and of the fleet's ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from launcher.fleet.ledger import Fleet
from launcher.platforms.base import Backend, Machines
from launcher.record.failures import ExcludedMachine
from launcher.record.fleet import Standing, kept_off, standings
from launcher.render.local import Bundle
from launcher.spec.errors import NOWHERE, PlatformError, Problem, UserError
from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a submission does without, and warnings."""

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
    """Ask the platform what can be known of a bundle before it is submitted; return warnings.

    Args:
        backend: the platform's.
        files: the bundle.
        spec: whose lines are named; None: of a run that resumes.
        without: nodes that are not to be used, besides those of the bundle.
        force: what keeps it from ever running there is a warning too.

    Raises:
        UserError: what keeps it from ever running there, all at once.
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
    ledger: Fleet | None,
    needed: int,
    excluded: Sequence[ExcludedMachine] = (),
    force: bool = False,
    wall: Callable[[], float] = time.time,
) -> Admission:
    """Ask as `ask` does, for a job that is kept off what the ledger holds for bad.

    Where the job would then not find enough machines, only operators' exclusions count, and the
    others are used, with a warning.

    Args:
        backend: the platform's.
        files: the bundle.
        spec: see `ask`.
        ledger: the fleet's; None: every machine may be used.
        needed: machines of the job.
        excluded: what the run itself has excluded.
        force: see `ask`.
        wall: the clock.

    Raises:
        UserError: as `ask`.
    """
    known = {each.host for each in excluded}
    chosen, warnings = _of_ledger(
        backend, files, ledger, needed=needed, known=known, now_unix=wall()
    )

    def answer(standings: Sequence[Standing]) -> Admission:
        more = [_excluded(each) for each in standings]
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


def prepare_ledger(ledger: Fleet) -> list[Problem]:
    """Make a ledger that is a ConfigMap, should there be none; return why it could not be made."""
    try:
        ledger.prepare()
    except (UserError, PlatformError) as error:
        return [_warning("HF189", f"pods cannot write the fleet's ledger: {error}")]
    return []


def _of_ledger(
    backend: Backend,
    files: Bundle,
    ledger: Fleet | None,
    *,
    needed: int,
    known: Collection[str],
    now_unix: float,
) -> tuple[list[Standing], list[Problem]]:
    """Return what the ledger keeps the job off, and why it could not be asked."""
    if ledger is None or not isinstance(backend, Machines):
        return [], []
    try:
        held = standings(ledger.entries(), now_unix)
        if not any(each.is_out for each in held.values()):
            return [], []
        pool = [machine.name for machine in backend.machines(files)]
    except (UserError, PlatformError) as error:
        return [], [_warning("HF189", f"the fleet's ledger is not used: {error}")]
    return [each for each in kept_off(held, pool, needed) if each.machine not in known], []


def _excluded(standing: Standing) -> ExcludedMachine:
    machine = standing.machine
    return ExcludedMachine(host=machine, member=machine, reason=standing.reason)


def _warning(code: str, message: str) -> Problem:
    return Problem(code=code, message=message, where=NOWHERE)

"""`holdfast batch`: what a wrapped batch script or pod calls in place of its torchrun."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from launcher.cli.common import EXIT_DONE, AsGiven, exit_with_problems
from launcher.spec.errors import UserError, writing

if TYPE_CHECKING:
    from launcher.wrap.wrapped_ending import Ending


@click.command("batch", cls=AsGiven, add_help_option=False, options_metavar="--")
@click.option("--signal", "signalled_by", default="", help="As sbatch has it: USR1@600.")
@click.option("--no-requeue", is_flag=True, help="The job is not put back into the queue.")
@click.argument("argv", nargs=-1, metavar="[srun [OPTIONS]] torchrun …")
def batch(*, argv: tuple[str, ...], signalled_by: str, no_requeue: bool) -> int:
    """Make the run directory of this job, and print the file that the batch script reads.

    In a pod, run this node's part of the job instead. `holdfast wrap` writes the lines that call
    it.
    """
    from launcher.wrap.wrapped import is_pod
    from launcher.wrap.wrapped_ending import signalled

    argv, env = argv[argv[:1] == ("--",) :], os.environ
    try:
        if is_pod(env):
            _pod(argv, env)
        else:
            click.echo(_agents(argv, env, signalled(signalled_by, requeue=not no_requeue)))
    except UserError as error:
        code = exit_with_problems(error, as_json=False)
        return code if is_pod(env) else EXIT_DO_NOT_RESTART
    return EXIT_DONE


def _agents(argv: tuple[str, ...], env: Mapping[str, str], ending: Ending) -> Path:
    """Make the run directory; return the file that starts its agents.

    Raises:
        UserError: HF169, HF678, or why there can be no run.
    """
    from elastic_trainer.storage.files import write_atomic
    from launcher.node.attempt import Attempt
    from launcher.plan.search import plan
    from launcher.platforms.slurm.parse import expand_nodes
    from launcher.render.local import render_local
    from launcher.runs import run_dir as run_dirs
    from launcher.runs.runs import is_run
    from launcher.spec.reading import load_spec
    from launcher.wrap.interpreter import agents_python
    from launcher.wrap.wrapped import job_of, launch_of, script_of

    launch = launch_of(argv, env)
    spec = load_spec(job_of(launch, env, ending))
    planned = plan(spec)
    number = Attempt.of_env(Path(), env).slurm_id
    run_dir = Path("runs", f"{spec.name}-{number}").absolute()
    of_job = expand_nodes(env.get("SLURM_JOB_NODELIST", ""))
    hosts = launch.options.hosts(of_job, expand_nodes)
    contained = launch.options.in_container
    python = sys.executable if contained else agents_python(launch.torchrun)
    script = script_of(
        *(spec, planned, launch, ending),
        run_dir=run_dir,
        python=python,
        hosts=() if len(hosts) == len(of_job) else hosts,
    )
    if not is_run(run_dir):
        files = render_local(
            spec, planned, run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
        )
        run_dirs.create(run_dir, files)
        run_dirs.check_storage(run_dir)
    with writing(run_dir):
        write_atomic(run_dir / run_dirs.AGENTS_SCRIPT, script)
    wish_s, grace_s = launch.shutdown_timeout_s, spec.elastic.stop_grace_s
    if wish_s is not None and wish_s > grace_s:
        lead_s = math.ceil(wish_s) + ending.lead_s - int(grace_s)
        enough = f"write #SBATCH --signal=TERM@{lead_s} and wrap the script again"
        _tell((f"--shutdown-timeout {wish_s:g}: workers have {grace_s:g} s; {enough}",))
    _tell(launch.notes)
    return run_dir / run_dirs.AGENTS_SCRIPT


def _pod(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Become the main process of a pod.

    Raises:
        UserError: HF169, HF674, or why there can be no run.
    """
    from launcher.node.pod import PodEnv
    from launcher.plan.search import plan
    from launcher.render.local import render_local
    from launcher.spec.reading import load_spec
    from launcher.wrap.wrapped import job_of, launch_of

    PodEnv.of(env)
    launch = launch_of(argv, env)
    spec = load_spec(job_of(launch, env))
    run_dir = Path(env["HOLDFAST_RUNS"], env["HOLDFAST_JOB"])
    files = render_local(
        spec, plan(spec), run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
    )
    wish_s, grace_s = launch.shutdown_timeout_s, spec.elastic.stop_grace_s
    if wish_s is not None and wish_s > grace_s:
        more = f"terminationGracePeriodSeconds and HOLDFAST_SHUTDOWN_S by {wish_s - grace_s:g}"
        _tell((f"--shutdown-timeout {wish_s:g}: workers have {grace_s:g} s; raise {more}",))
    _tell(launch.notes)
    try:
        _keep(run_dir, files)
    except (OSError, ValueError) as error:
        # The pod's main process finds the same, waits, and has the pod made anew.
        click.echo(f"holdfast: {run_dir}: {error}", err=True)
    sys.stderr.flush()
    words = [sys.executable, "-P", "-m", "launcher.node", "pod", str(run_dir)]
    os.execve(sys.executable, words, dict(env))  # noqa: S606  there is no shell in between


def _keep(run_dir: Path, files: Mapping[str, str]) -> None:
    """Write the job's files; while the job runs, those of its first pod count.

    Raises:
        OSError, ValueError: the storage or the board cannot be read or written.
    """
    from elastic_trainer.storage.files import write_atomic
    from launcher.node.attempt import live_lease

    run_dir.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = run_dir / name
        # A job that was made anew under its name may have other arguments.
        if not path.is_file() or (
            path.read_text(encoding="utf-8") != text
            and live_lease(run_dir, lambda _: False) is None
        ):
            write_atomic(path, text)


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        click.echo(f"holdfast: {note}", err=True)

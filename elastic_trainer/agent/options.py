"""The agent's command line and what it comes to; `torchrun`'s names where they mean the same."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.agent.flags import (
    CONF_TEXTS,
    CONF_UNUSED,
    FROM_SCRATCH,
    SCRIPT_GRACE_S,
    OptionsError,
    Streams,
    elastic_of,
    event_log_handler,
    flag,
    node_range,
    parse_flags,
    progress_pattern,
    refuse,
    rendezvous_conf,
    shutdown_timeout_s,
    signals,
    static_store,
    streams,
    unfit,
    unused_variables,
    virtual_devices,
    workers_per_node,
)
from elastic_trainer.agent.membership.lease import slurm_job
from elastic_trainer.agent.membership.tasks import Task
from elastic_trainer.board.address import BOARD_VARIABLE
from elastic_trainer.plan.command import Command, explain, literal, split_command, unknown_names
from elastic_trainer.plan.config import (
    NO_DOMAIN,
    CodeSection,
    ElasticSection,
    NetworkSection,
    TrainConfig,
)
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.worker.zygote import DEFAULT_PRELOAD

IN_JOB_JSON = (
    "nnodes",
    "nproc_per_node",
    "rdzv_id",
    "rdzv_endpoint",
    "rdzv_conf",
    "max_restarts",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "shutdown_timeout",
    "signals_to_handle",
    "master_port",
    "virtual_local_rank",
    "numa_binding",
    "role",
)
"""Flags that --run-dir excludes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One agent's orders, wherever they came from."""

    node: str
    host: str
    """The machine; called as `node`, but for pods."""
    run_id: str
    job: str
    """Id of this submission, the same on every node of it."""
    attempt: str
    """Names its folder in the logs."""
    run_dir: Path | None
    """None outside a rendered run: workers then get no HOLDFAST_RUN_DIR."""
    record_dir: Path
    """What all agents see: events, and by default the board and the run's secret."""
    log_root: Path
    """Where the workers' logs are, by attempt and node."""
    board: str | None = None
    """Address of the board; None: files in `record_dir`."""
    local_addr: str | None
    workers: int
    ladder: Ladder
    """What the workers run on how many nodes."""
    task: Task
    readmit: bool = False
    """Come back although the job has excluded this node."""
    secret_file: Path | None = None
    """Has the run's secret; None: it is in `record_dir`."""
    failure_domain: str = ""
    """Rack, block or switch of this node; empty: unknown."""
    leaves_alone: bool = False
    """SIGTERM means this node only; the job continues without it."""
    named_job: str | None = None
    """`job` where it was given; None: it is the id of the run, and says nothing."""
    if_done: str | None = None
    """See AgentConfig."""
    accelerators: bool = False
    """Workers need one each: a node that has fewer is refused."""
    elastic: ElasticSection = field(default_factory=ElasticSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    role: str = "default"
    event_log_handler: str = "null"
    """Of torchelastic's events, by the name it is registered under."""
    streams: Mapping[int, Streams] | None = None
    """Local rank -> what is shown of it; None: one log per worker, and nothing on the console."""
    progress_pattern: str | None = None
    preload: str = ""
    """Modules that the zygote imports for a script, separated by commas."""
    stop_grace_s: float = SCRIPT_GRACE_S
    """Between the stop signal and SIGKILL, for a script that takes no requests."""
    signals: frozenset[str] = field(default_factory=lambda: signals(None))
    """Names of signals that ask for a stop, besides SIGTERM, SIGINT and SIGUSR2."""
    static_store: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT of the one node; None: its address, and any free port."""
    devices: tuple[str, ...] = ()
    """By local rank: what CUDA_VISIBLE_DEVICES is for a worker, whose LOCAL_RANK is 0 then; none:
    workers see all."""
    numa_binding: str | None = None
    """torch.numa.binding.AffinityMode: which CPUs near its GPU a worker runs on; None: not said."""
    line_prefix: str | None = None
    """Template of the prefix of --tee's lines; None: `[role local_rank]:`."""
    notes: tuple[str, ...] = ()
    """To be reported at the start."""
    temporary: Path | None = None
    """Folder that was made for this job alone, and goes after a good end."""
    code: CodeSection | None = None
    """The frozen copy that workers run; None: none was made."""


def parse(argv: Sequence[str] | None, env: Mapping[str, str]) -> Options:
    """Read the command line, and job.json when it names a run.

    Raises:
        OptionsError: HF501 the command line, HF502 job.json cannot be used, HF503 the script.
        SystemExit: --help (0).
    """
    args = parse_flags(argv)
    return _of_run(args, env) if args.run_dir else _of_flags(args, env)


def _of_run(args: argparse.Namespace, env: Mapping[str, str]) -> Options:
    both = [flag(name) for name in IN_JOB_JSON if getattr(args, name) is not None]
    if both:
        listed = ", ".join(both)
        message = f"{listed}: job.json in --run-dir says how to run; leave it out"
        raise OptionsError("HF501", message)
    run_dir = args.run_dir.resolve()
    path = run_dir / "job.json"
    try:
        config = TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; name a run that was rendered"
        raise OptionsError("HF502", message) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OptionsError("HF502", f"{path}: {error}; render the job again") from error
    pattern = progress_pattern(args.progress_pattern or config.elastic.progress_pattern)
    task = _task(args, pattern, env) if args.training_script else _job_task(args, config, pattern)
    shared = _shared_fields(args, env, config.elastic.failure_domain)
    if not shared["named_job"]:
        # One made up here would differ from the other nodes'.
        raise OptionsError("HF501", "give --job ID (or $HOLDFAST_JOB), the same on every node")
    return Options(
        **shared,
        run_id=config.run_id,
        job=shared["named_job"],
        if_done=args.if_done or "ok",
        run_dir=run_dir,
        record_dir=run_dir,
        log_root=run_dir / "logs",
        workers=config.gpus_per_node,
        accelerators=config.device == "cuda",
        event_log_handler=event_log_handler(
            args.event_log_handler or env.get("PET_EVENT_LOG_HANDLER")
        ),
        ladder=config.ladder,
        task=task,
        elastic=config.elastic,
        network=config.network,
        progress_pattern=pattern,
        preload=args.preload or config.elastic.preload or "",
        stop_grace_s=config.elastic.stop_grace_s,
        notes=tuple(unused_variables(env, of_run=True)),
        code=config.code,
    )


def _of_flags(args: argparse.Namespace, env: Mapping[str, str]) -> Options:
    notes = refuse(args, env)
    low, high = node_range(args.nnodes or "1")
    workers = workers_per_node(args.nproc_per_node or "1")
    conf = rendezvous_conf(args.rdzv_conf or "")
    if args.training_script is None:
        raise OptionsError("HF501", "which script? Give one after the flags, or --run-dir RUN")
    unused = [key for key in conf if key in CONF_UNUSED]
    notes += [f"{key} of --rdzv-conf is not used: {CONF_UNUSED[key]}" for key in unused]
    if (store := static_store(args, high)) is None:
        notes += [
            f"{flag(name)} is not used: each epoch has a store on a node that lives; see "
            f"{name.upper()} in the workers"
            for name in ("master_addr", "master_port")
            if getattr(args, name) is not None
        ]
    pattern, shown = progress_pattern(args.progress_pattern), streams(args, workers)
    task = _task(args, pattern, env)
    endpoint, run_id = _meeting(args, high)
    record, temporary = endpoint / run_id, None
    if args.standalone or args.rdzv_endpoint is None:
        # Output that went to no console is there alone.
        only_logged = args.redirects is not None and args.log_dir is None
        temporary = None if only_logged else endpoint if args.rdzv_id else record
        goes = "" if temporary is None else ", until it has ended well"
        notes.append(f"the record of this job (events, logs) is in {record}{goes}")
    elastic = elastic_of(conf)
    if args.max_restarts is not None:
        if args.max_restarts < 0:
            raise unfit("--max-restarts", args.max_restarts, "0 or more")
        elastic["max_restarts"] = args.max_restarts
    elastic[FROM_SCRATCH] = conf.get(FROM_SCRATCH) == "true"
    shared = _shared_fields(args, env)
    return Options(
        **shared,
        run_id=run_id,
        job=shared["named_job"] or run_id,
        if_done=args.if_done,
        run_dir=None,
        record_dir=record,
        log_root=Path(args.log_dir).resolve() / run_id if args.log_dir else record / "logs",
        workers=workers,
        ladder=Ladder.data_parallel(max_nodes=high, min_nodes=low, workers=workers),
        task=task,
        elastic=ElasticSection(**{"min_nodes": low, **elastic}),  # type: ignore[arg-type]
        network=NetworkSection(
            **{key: conf[key] for key in CONF_TEXTS if key in conf}  # type: ignore[arg-type]
        ),
        role=args.role or "default",
        event_log_handler=event_log_handler(args.event_log_handler),
        streams=shown,
        progress_pattern=pattern,
        preload=args.preload or "",
        stop_grace_s=shutdown_timeout_s(args, env),
        signals=signals(args.signals_to_handle),
        static_store=store,
        devices=virtual_devices(workers, env) if args.virtual_local_rank else (),
        numa_binding=args.numa_binding,
        line_prefix=env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        notes=tuple(notes),
        temporary=temporary,
    )


def failure_domain(env: Mapping[str, str], wish: str | None) -> str:
    """Return this node's failure domain: HOLDFAST_FAILURE_DOMAIN, or Slurm's switch or block.

    Slurm names the way to a node, as `spine.leaf.node`, in the environment of each task, if it
    knows the topology; all but the node itself, or the lowest levels, is the domain.
    `wish` is `elastic.failure_domain`: levels above the node, or none; in pods a node label, whose
    value comes by HOLDFAST_FAILURE_DOMAIN.
    """
    if wish == NO_DOMAIN:
        return ""
    if domain := env.get("HOLDFAST_FAILURE_DOMAIN"):
        return domain
    levels = int(wish) if wish is not None and wish.isdecimal() else 1
    return ".".join(env.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:-levels])


def _shared_fields(
    args: argparse.Namespace, env: Mapping[str, str], domain: str | None = None
) -> dict[str, Any]:
    return {
        "node": args.node,
        "host": args.host or args.node,
        "attempt": args.attempt,
        "readmit": args.readmit,
        "secret_file": args.secret_file,
        "failure_domain": args.failure_domain or failure_domain(env, domain),
        "board": args.board or env.get(BOARD_VARIABLE) or None,
        "named_job": args.job or env.get("HOLDFAST_JOB") or slurm_job(env),
        "leaves_alone": args.on_term == "leave",
        "local_addr": args.local_addr,
    }


def _meeting(args: argparse.Namespace, max_nodes: int) -> tuple[Path, str]:
    """Return the directory where agents meet, and the id of the job in it."""
    if args.standalone or (args.rdzv_endpoint is None and max_nodes == 1):
        if max_nodes > 1:
            message = f"--standalone is one node, --nnodes {args.nnodes} is more: leave one out"
            raise OptionsError("HF501", message)
        folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        # As under torchrun: without an id each job gets another.
        return (folder, args.rdzv_id) if args.rdzv_id else (folder.parent, folder.name)
    if args.rdzv_endpoint is None:
        lacks = "needs --rdzv-endpoint DIR on storage that all nodes share"
        raise OptionsError("HF501", f"--nnodes {args.nnodes} {lacks}")
    run_id = args.rdzv_id or "none"
    if not re.fullmatch(r"[\w.+-]+", run_id) or run_id.startswith("."):
        raise unfit("--rdzv-id", run_id, "letters, digits and ._+-, for it names a folder")
    return Path(args.rdzv_endpoint).resolve(), run_id


def _job_task(args: argparse.Namespace, config: TrainConfig, pattern: str | None) -> Task:
    if config.command is None:
        return Task(kind="main", target=DEFAULT_PRELOAD, fresh=args.fresh, cwd=str(Path.cwd()))
    try:
        command = split_command(config.command)
    except ValueError as error:
        raise OptionsError("HF502", f"command in job.json: {error}") from error
    return _checked(command, Path(config.command_dir or "."), pattern, fresh=args.fresh)


def _task(args: argparse.Namespace, pattern: str | None, env: Mapping[str, str]) -> Task:
    """Return what the command line says to run; PYTHON_EXEC names the interpreter, as torchrun's.

    Another than the agent's is started for each worker: what is forked has the agent's.
    """
    if args.no_python and args.module and not args.run_path:
        raise OptionsError("HF501", "--no-python and --module exclude each other")
    kind = "command" if args.no_python else "module" if args.module else "script"
    if args.run_path:  # torchrun's other flags of this kind have no effect then
        kind = "script"
    command = Command(
        kind=kind, target=args.training_script, args=literal(args.training_script_args)
    )
    task = _checked(command, Path.cwd(), pattern, fresh=args.fresh)
    python = env.get("PYTHON_EXEC")
    if not python or args.run_path or task.kind not in ("script", "module"):
        return task
    if shutil.which(python) == sys.executable:
        return task
    words = ("-u", *(("-m",) if kind == "module" else ()), task.target, *task.args)
    interpreter = Command(kind="command", target=python, args=words)
    return _checked(interpreter, Path.cwd(), pattern, fresh=args.fresh)


def _checked(command: Command, cwd: Path, pattern: str | None, *, fresh: bool) -> Task:
    for name in unknown_names(command.args):
        raise OptionsError("HF511", explain(name))
    kind, target = command.kind, command.target
    if kind == "command" and shutil.which(str(cwd / target) if "/" in target else target) is None:
        where = f"working directory {cwd}" if "/" in target else "looked for on the PATH"
        message = f"there is no executable {target} on this node ({where})"
        raise OptionsError("HF503", f"{message}; fix it, or install it on every node")
    if kind == "module" and target == DEFAULT_PRELOAD:
        kind = "main"
    if kind == "script" and not (cwd / target).exists():  # Python runs folders and archives, too
        message = f"there is no script {target} on this node (working directory {cwd})"
        raise OptionsError("HF503", f"{message}; fix the path, every node needs it")
    return Task(
        kind=kind,
        target=target,
        args=command.args,
        fresh=fresh or command.fresh,
        cwd=str(cwd),
        count_steps=pattern is None,
    )

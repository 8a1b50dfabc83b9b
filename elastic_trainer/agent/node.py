"""One node's agent from its options: zygote first, then keeper, rendezvous and its loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.flags import SIGNALS, OptionsError, signals
from elastic_trainer.agent.hangs.hang import CPU, CUDA, DeviceLimits
from elastic_trainer.agent.hardware import (
    FABRIC_VARIABLE,
    ask,
    check_fabric,
    healthy,
    local_cpus,
    nccl_net,
    numa_cpus,
    seen,
)
from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.membership.terms import layout_terms, unnamed
from elastic_trainer.agent.metrics import NodeMetrics
from elastic_trainer.agent.options import Options
from elastic_trainer.agent.rendezvous import EVERYWHERE, HoldfastRendezvous
from elastic_trainer.agent.settings import AgentConfig
from elastic_trainer.agent.stop_signals import ALWAYS, Waker
from elastic_trainer.agent.wire.addresses import interfaces, local_address, parse_ports, with_links
from elastic_trainer.agent.wire.network import listen
from elastic_trainer.agent.workers.environment import Scratch, base_environment
from elastic_trainer.agent.workers.group import forward_error_file
from elastic_trainer.agent.workers.reporter import FIRST_S, Voice, Waiting
from elastic_trainer.agent.workers.scripts import Scripts
from elastic_trainer.agent.workers.tail import LogFollower
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.agent.workers.zygote_client import ZygoteClient
from elastic_trainer.board.address import BOARD_VARIABLE, FILE
from elastic_trainer.board.open_board import open_board
from elastic_trainer.plan.config import METRICS_TARGETS
from elastic_trainer.plan.gpus import Gpu
from elastic_trainer.plan.locked_memory import locked_memory
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import EXIT_DONE, EXIT_FAILED
from elastic_trainer.record.script_steps import WRITER
from elastic_trainer.state.snapshots.peer import IMAGES, KEEPER_LABEL
from elastic_trainer.storage.storage_probe import probe_storage
from elastic_trainer.worker.fresh_process import CODE, SOURCE, frozen_python_path
from elastic_trainer.worker.process import ask_for_a_name, cpu_list, open_files
from elastic_trainer.worker.secret import (
    Badge,
    Secret,
    SecretError,
    adopt_secret,
    authenticate,
    make_secret,
)

AUTHENTICATE_S = 5.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
RECORD = {"board", "events", "logs", "nodes", "secret", "stacks"}
"""What an agent itself puts into the folder of a job that has no job file."""


def run(options: Options) -> int:
    """Run the agent until the job stops, see `_run`.

    A temporary folder is removed where it has nothing that anybody may want, and else named.
    """
    code, record = EXIT_FAILED, options.record_dir
    try:
        code = _run(options)
    finally:
        if options.temporary is not None:
            found = {path.name for path in record.glob("*")}
            if not found or (code == EXIT_DONE and found <= RECORD):
                shutil.rmtree(options.temporary, ignore_errors=True)
            else:
                sys.stderr.write(f"holdfast agent: the record of this job stays in {record}\n")
    return code


def _fabric_notes() -> Iterator[str]:
    """Yield what is wrong with this node's RDMA and stops nothing."""
    if os.environ.get(FABRIC_VARIABLE, "none") == "none":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with contextlib.suppress(OSError, ValueError):  # advice
        if wrong := locked_memory(Path("/proc/self/status").read_text(encoding="utf-8"), limit):
            yield wrong


def _run(options: Options) -> int:
    """Run the agent until the job stops. The process must have no thread yet.

    Returns:
        The exit code: 0, 91, 92, 93, 94, or 1.

    Raises:
        OptionsError: HF504, HF512, HF513, what the options ask for is not on this node.
        FabricError: HF505, this node lacks the job's fabric.
        StorageError: HF617, the run directory's file system lacks something.
    """
    address, ports = _network(options)
    check_fabric(os.environ)
    bound = _bound_cpus(options)
    record = options.record_dir
    record.mkdir(parents=True, exist_ok=True)
    # Neither board nor secret may be files there.
    is_data = options.secret_file is not None and options.board not in (None, FILE)
    probe_storage(record, is_data=is_data)
    for note in (*options.notes, *_fabric_notes()):
        sys.stderr.write(f"holdfast agent: {note}\n")
    env = _environment(options, address)
    with contextlib.ExitStack() as stack:
        # First of all: later this process has threads, and what has threads cannot be forked.
        task = options.task
        zygote = ZygoteClient.forked(preload=task.preload, env=env, cwd=task.cwd)
        workers = Workers(task, env=env, zygote=zygote)
        stack.callback(workers.close)
        open_files()  # after the fork: scripts keep the limit that the user has set
        scratch = Scratch(options.run_id, options.node)
        stack.callback(scratch.remove)
        secret_dir, secret = _secret(options, scratch)
        log = EventLog(record, f"agent-{options.node}", node=options.node)
        stack.callback(log.close)
        waker = Waker()
        stack.callback(waker.close)
        keeper = _keeper(options, scratch, address, ports, secret=secret)
        keeper.start()
        stack.callback(keeper.close)
        gpus = ask() if options.accelerators else None
        voice = Voice()
        stack.callback(voice.close)
        # Before it is warm: a node that dies while it warms up is then known to be dead.
        me = _member(options, address, gpus, keeper)
        rendezvous = _rendezvous(
            options, me, ports, secret=secret, log=log, voice=voice, waker=waker
        )
        stack.callback(rendezvous.close)
        metrics = _metrics(options, address)
        if metrics is not None:
            stack.callback(metrics.close)
        agent = HoldfastAgent(
            _agent_config(options, rendezvous.me, scratch, secret_dir, gpus=gpus, bound=bound),
            _worker_spec(options, rendezvous),
            workers=workers,
            waker=waker,
            log=log,
            scripts=_scripts(options, log, voice),
            keeper=keeper,
            metrics=metrics,
            voice=voice,
        )
        names = threading.Thread(target=ask_for_a_name, name="holdfast-names", daemon=True)
        names.start()
        stack.callback(names.join)  # inside torch it must not be when the interpreter ends
        result = agent.run(options.role)
        forward_error_file(result)
    return result.code


def _secret(options: Options, scratch: Scratch) -> tuple[Path, Secret]:
    """Return where the workers find the run's secret, and the secret."""
    if options.secret_file is None:
        return options.record_dir, make_secret(options.record_dir)
    return scratch.path, adopt_secret(options.secret_file, scratch.path)


def _keeper(
    options: Options, scratch: Scratch, address: str, ports: range, *, secret: Secret
) -> Keeper:
    badge = Badge(secret, KEEPER_LABEL, options.run_id)
    return Keeper(
        scratch.snapshots,
        address,
        ports,
        authenticate=partial(authenticate, badge=badge, server=True, timeout_s=AUTHENTICATE_S),
        key=secret.sign(IMAGES, options.run_id.encode()),
        links=_links(options),
    )


def _member(options: Options, address: str, gpus: Sequence[Gpu] | None, keeper: Keeper) -> Member:
    """Return this node as peers are to know it; `HoldfastRendezvous` adds its id and port."""
    return Member(
        agent_id="",
        node=options.node,
        host=options.host,
        address=address,
        port=0,
        workers=healthy(options.workers, gpus, os.environ.get(_VISIBLE)),
        snapshot_port=keeper.port,
        domain=options.failure_domain,
    )


def _rendezvous(
    options: Options,
    me: Member,
    ports: range,
    *,
    secret: Secret,
    log: EventLog,
    voice: Voice,
    waker: Waker,
) -> HoldfastRendezvous:
    """Listen for peers and take this node's place in the job."""
    return HoldfastRendezvous(
        me,
        ports=ports,
        run_id=options.run_id,
        job=options.job,
        secret=secret,
        settings=Settings(
            **dataclasses.asdict(options.elastic),
            workers=options.workers,
            ladder=options.ladder,
            terms=_terms(options),
            prepares=_prepares(options, ports),
        ),
        board=open_board(
            options.record_dir / "board",
            options.board,
            on_damage=lambda reason: log.emit("board.damaged", reason=reason),
        ),
        ready=False,
        readmit=options.readmit,
        static_store=options.static_store,
        log=_recorder(options, log, voice, secret),
        notify=waker.wake,
        crashed=die,
    )


def _prepares(options: Options, ports: range) -> bool:
    """Whether workers can wait for the next epoch while this one runs.

    A script does not say where it could, and two stores need two ports. On a GPU a second context
    and its communicators take memory that the running epoch may need: only with standbys.
    """
    two_ports = len(ports) > 1 or ports == range(1)
    has_room = options.elastic.standby or not options.accelerators
    return options.task.kind == "main" and two_ports and has_room


def _metrics(options: Options, address: str) -> NodeMetrics | None:
    """Serve this node's metrics where the job asks for them, at the address of its network."""
    port, record = options.network.metrics_port, options.record_dir
    if port is None:
        return None
    # The run by the name of its directory, as `holdfast metrics` has it.
    metrics = NodeMetrics(record.name, options.node, path=record / METRICS_TARGETS, port=port)
    metrics.start(address)
    return metrics


def _worker_spec(options: Options, rendezvous: HoldfastRendezvous) -> WorkerSpec:
    return WorkerSpec(
        role=options.role,
        local_world_size=options.workers,
        rdzv_handler=rendezvous,
        entrypoint=options.task.target,
        max_restarts=options.elastic.max_restarts,
        event_log_handler=options.event_log_handler,
    )


def _network(options: Options) -> tuple[str, range]:
    """Return the address that peers are told, and the ports to listen on.

    Raises:
        OptionsError: HF504 no address or port fits; HF512 --master-port cannot be had.
    """
    network = options.network
    try:
        ports = parse_ports(network.ports)
        address = options.local_addr or local_address(
            interface=network.interface, cidr=network.cidr
        )
    except ValueError as error:
        raise OptionsError("HF504", str(error)) from error
    if options.static_store is not None:
        _, port = options.static_store
        try:
            listen(EVERYWHERE, range(port, port + 1)).close()
        except OSError as error:
            message = f"--master-port {port} cannot be had on this machine: {error.strerror}"
            raise OptionsError("HF512", f"{message}; give another, or leave it out") from error
    return address, ports


def _environment(options: Options, address: str) -> dict[str, str]:
    env = base_environment(
        os.environ,
        workers=options.workers,
        address=address,
        run_dir=options.run_dir,
        record_dir=options.record_dir,
    )
    if options.code is not None:
        env |= {CODE: options.code.dir, SOURCE: options.code.source}
        env |= frozen_python_path(env)
    env |= nccl_net(env)
    is_usual = options.signals == signals(None)
    names = SIGNALS if is_usual else ",".join(sorted(options.signals))
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names  # a launcher within a worker takes them over
    env["HOLDFAST_SINCE"] = str(time.monotonic())
    # What a batch is that is given for each worker, should there be fewer of them.
    env["HOLDFAST_FULL_WORLD_SIZE"] = str(options.ladder.max_nodes * options.workers)
    env["HOLDFAST_PRELOAD"] = options.preload
    if options.board is not None:
        env[BOARD_VARIABLE] = options.board
    return env


def _links(options: Options) -> list[str]:
    """Return the addresses of the interfaces for copies; say what is missing."""
    if not (asked := options.network.copy_interfaces):
        return []
    found = interfaces()
    addresses, missing = with_links(found, asked)
    if missing:
        sys.stderr.write(
            f"holdfast agent: copies of snapshots do without {', '.join(missing)}: no link, or no "
            f"address, on this node; it has {', '.join(map(str, found))}\n"
        )
    return addresses


def _terms(options: Options) -> dict[str, str]:
    """Return what this node's agent has to have in common with the others, in words for people."""
    task, elastic = options.task, options.elastic
    values = ((each, getattr(elastic, each.name)) for each in dataclasses.fields(elastic))
    changed = (f"{each.name}={value}" for each, value in values if value != each.default)
    return {
        "agent": "holdfast",
        "workers per node": str(options.workers),
        **layout_terms(options.ladder),
        "holdfast": _version("holdfast-ml"),
        "torch": _version("torch"),
        "script": task.target,
        "arguments": unnamed(task.args),
        "elastic settings": " ".join(changed),
    }


def _version(distribution: str) -> str:
    """Return which version is installed; a folder of sources has none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _recorder(
    options: Options, log: EventLog, voice: Voice, secret: Secret
) -> Callable[[str, int | None, dict[str, Any]], None]:
    """Return what puts an event of membership on record.

    It also says that the board fails, or was removed. The record may be where the board is, and be
    lost with it; so may the secret, which is put back.
    """
    failing = Waiting(time.monotonic() - FIRST_S)

    def put_back() -> None:
        try:
            secret.publish(options.record_dir)
        except SecretError as error:
            voice.say(f"no other agent can join this job: {error}")

    def record(event: str, epoch: int | None, fields: dict[str, Any]) -> None:
        log.emit_later(event, epoch, fields)
        if event == "board.failed" and failing.due(time.monotonic()):
            voice.say(f"the board of the job fails, so that no epoch can begin: {fields['reason']}")
        if event == "board.damaged":
            voice.say(f"the board of the job: {fields['reason']}")
            if options.secret_file is None:
                # Not here: storage may not answer, and peers wait for an answer.
                threading.Thread(target=put_back, daemon=True).start()

    return record


def _scripts(options: Options, log: EventLog, voice: Voice) -> Scripts:
    follower = None
    if options.streams is not None or options.progress_pattern is not None:
        follower = LogFollower(
            options.streams or {},
            options.progress_pattern,
            role=options.role,
            prefix=options.line_prefix,
        )
    return Scripts(
        options.task,
        log,
        say=voice.say,
        shown=EventLog(options.record_dir, f"{WRITER}{options.node}", node=options.node),
        record_dir=options.record_dir,
        follower=follower,
        split=options.streams is not None,
        grace_s=options.stop_grace_s,
        stop_signal=signal.Signals[f"SIG{options.elastic.stop_signal}"],
        from_scratch=options.elastic.from_scratch,
    )


def _bound_cpus(options: Options) -> tuple[str, ...]:
    """Return the CPUs of each worker that --numa-binding asks for; empty: it was not given.

    Raises:
        OptionsError: HF513.
    """
    if options.numa_binding is None:
        return ()
    try:
        return tuple(map(cpu_list, numa_cpus(options.numa_binding, options.workers)))
    except ValueError as error:
        message = f"--numa-binding {options.numa_binding}: {error}; leave it out"
        raise OptionsError("HF513", message) from error


def _agent_config(
    options: Options,
    me: Member,
    scratch: Scratch,
    secret_dir: Path,
    *,
    gpus: Sequence[Gpu] | None,
    bound: tuple[str, ...],
) -> AgentConfig:
    found = tuple(seen(gpus or (), os.environ.get(_VISIBLE)))
    near = local_cpus(found, os.sched_getaffinity(0))
    return AgentConfig(
        me=me,
        workers=options.workers,
        gpus=found,
        cpus=bound or tuple(None if cpus is None else cpu_list(cpus) for cpus in near),
        scratch=scratch.path,
        secret_dir=secret_dir,
        log_dir=options.log_root / options.attempt / options.node,
        stacks_dir=options.record_dir / "stacks",
        hang_ceiling_s=options.elastic.hang_ceiling_s,
        start_ceiling_s=options.elastic.start_ceiling_s,
        device=device_limits(options),
        watch_all=options.task.kind == "main",
        stop_signals=ALWAYS | options.signals,
        devices=options.devices,
        leaves_alone=options.leaves_alone,
        named_job=options.named_job,
        if_done=options.if_done,
        standbys_for=options.ladder if options.elastic.standby else None,
    )


def device_limits(options: Options) -> DeviceLimits:
    """Return what the workers' device allows; the job file's floor counts first."""
    limits, floor_s = CUDA if options.accelerators else CPU, options.elastic.hang_floor_s
    return limits if floor_s is None else dataclasses.replace(limits, hang_floor_s=floor_s)


def die(error: BaseException) -> None:
    """End the process at once, and with it the zygote and the workers: the node counts as lost."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def die_of_a_thread(args: threading.ExceptHookArgs) -> None:
    """End the agent when one of its threads fails: half an agent is worse than none."""
    if args.exc_type is not SystemExit:
        die(args.exc_value or args.exc_type())

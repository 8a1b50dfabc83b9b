"""`holdfast-agent`: builds one node's agent from its orders and runs it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_trainer.agent.accelerators import healthy
from elastic_trainer.agent.boards.open_board import BOARD_VARIABLE, BoardPlaceError, open_board
from elastic_trainer.agent.command.options import Options, OptionsError, parse
from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.wire.addresses import local_address
from elastic_trainer.agent.wire.client import MembershipClient
from elastic_trainer.agent.wire.reactor import Reactor
from elastic_trainer.agent.wire.secret import Badge, Secret, SecretError, authenticate, make_secret
from elastic_trainer.agent.wire.store import EpochStore, parse_ports
from elastic_trainer.agent.wire.transport import Endpoint
from elastic_trainer.agent.wire.waker import Waker
from elastic_trainer.agent.workers.environment import base_environment
from elastic_trainer.agent.workers.scratch import Scratch
from elastic_trainer.agent.workers.settings import AgentConfig
from elastic_trainer.agent.workers.tail import LogFollower
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.code_path import CODE, SOURCE, frozen_python_path
from elastic_trainer.event_log import EventLog
from elastic_trainer.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.name_service import ask_for_a_name
from elastic_trainer.script_steps import WRITER
from elastic_trainer.snapshots.peer import KEEPER_LABEL

if TYPE_CHECKING:
    from elastic_trainer.agent.agent import HoldfastAgent

AUTHENTICATE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return its exit code.

    As a program (`argv` None) it ends at once then: a thread that waits for storage which
    never answers must not hold the node.
    """
    if argv is None:
        threading.excepthook = _die_of_a_thread
    try:
        code = run(parse(argv, os.environ))
    except (OptionsError, SecretError, BoardPlaceError) as error:
        sys.stderr.write(f"holdfast agent: error: {error}\n")
        code = EXIT_DO_NOT_RESTART
    except Exception:  # noqa: BLE001  the last frame: say what happened, then end at once
        traceback.print_exc()
        code = 1
    if argv is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run(options: Options) -> int:
    """Run the agent until the job stops.

    Returns:
        The exit code: 0, 91, 92, 93, 94, or 1.

    Raises:
        OptionsError: HF504, the network section does not fit this node.
    """
    address, ports = _network(options)
    options.shared_dir.mkdir(parents=True, exist_ok=True)
    secret = make_secret(options.shared_dir)
    for note in options.notes:
        sys.stderr.write(f"holdfast agent: {note}\n")
    with contextlib.ExitStack() as stack:
        # First of all: it imports while this process does.
        workers = Workers(options.task, env=_environment(options, address))
        stack.callback(workers.close)
        scratch = Scratch(options.run_id, options.node)
        stack.callback(scratch.remove)
        log = EventLog(options.record_dir, f"agent-{options.node}", node=options.node)
        stack.callback(log.close)
        waker = Waker()
        stack.callback(waker.close)
        keeper = _keeper(options, scratch, address, ports, secret=secret)
        keeper.start()
        stack.callback(keeper.close)
        store = EpochStore(address, ports)
        stack.callback(store.close)
        reactor = Reactor(crashed=die)
        reactor.start()
        stack.callback(reactor.stop)
        me, client = build_client(
            options,
            address,
            ports,
            secret=secret,
            reactor=reactor,
            store=store,
            log=log,
            snapshot_port=keeper.port,
            notify=waker.wake,
        )
        # At once: a node that dies while it warms up is then known to be dead.
        client.start()
        agent = _agent(
            options,
            _agent_config(options, me, scratch),
            workers=workers,
            client=client,
            waker=waker,
            log=log,
            free_snapshots=keeper.free,
        )
        names = threading.Thread(target=ask_for_a_name, name="holdfast-names", daemon=True)
        names.start()
        stack.callback(names.join)  # inside torch it must not be when the interpreter ends
        agent.run(options.role)
    return agent.exit_code


def _network(options: Options) -> tuple[str, range]:
    """Return the address that peers are told, and the ports to listen on."""
    network = options.network
    try:
        ports = parse_ports(network.ports)
        address = options.local_addr or local_address(
            interface=network.interface, cidr=network.cidr
        )
    except ValueError as error:
        raise OptionsError("HF504", str(error)) from error
    return address, ports


def _environment(options: Options, address: str) -> dict[str, str]:
    """Return what the zygote and all workers find in their environment."""
    env = base_environment(
        os.environ, workers=options.workers, address=address, run_dir=options.run_dir
    )
    if options.code is not None:
        env |= {CODE: options.code.dir, SOURCE: options.code.source}
        env |= frozen_python_path(env)
    env["HOLDFAST_SINCE"] = str(time.monotonic())
    env["HOLDFAST_SECRET_DIR"] = str(options.shared_dir)
    if options.board is not None:
        env[BOARD_VARIABLE] = options.board
    return env


def _keeper(
    options: Options, scratch: Scratch, address: str, ports: range, *, secret: Secret
) -> Keeper:
    return Keeper(
        scratch.snapshots,
        address,
        ports,
        authenticate=partial(
            authenticate,
            secret=secret,
            server=True,
            label=KEEPER_LABEL,
            context=options.run_id,
            timeout_s=AUTHENTICATE_S,
        ),
    )


def _agent(
    options: Options,
    config: AgentConfig,
    *,
    workers: Workers,
    client: MembershipClient,
    waker: Waker,
    log: EventLog,
    free_snapshots: Callable[[int], None],
) -> HoldfastAgent:
    follower = _follower(options)
    # Late: torch takes a second or two, and the zygote and the peers need not wait for it. What is
    # imported stays: the collector looks at none of it, now or later.
    gc.disable()
    from elastic_trainer.agent.agent import HoldfastAgent
    from elastic_trainer.agent.workers.ends import worker_spec
    from elastic_trainer.agent.workers.scripts import Scripts

    gc.freeze()
    gc.enable()
    return HoldfastAgent(
        config,
        worker_spec(
            options.workers,
            options.task.target,
            options.elastic.max_restarts,
            role=options.role,
        ),
        workers=workers,
        membership=client,
        waker=waker,
        log=log,
        scripts=Scripts(
            options.task,
            options.layouts,
            log,
            shown=EventLog(options.record_dir, f"{WRITER}{options.node}", node=options.node),
            record_dir=options.record_dir,
            follower=follower,
            split=options.streams is not None,
            grace_s=options.stop_grace_s,
        ),
        free_snapshots=free_snapshots,
    )


def _follower(options: Options) -> LogFollower | None:
    if options.streams is None and options.progress_pattern is None:
        return None
    return LogFollower(options.streams or {}, options.progress_pattern, role=options.role)


def die(error: BaseException) -> None:
    """End the process at once, and with it the zygote and the workers: the node counts as lost."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _die_of_a_thread(args: threading.ExceptHookArgs) -> None:
    """End the agent when one of its threads fails: half an agent is worse than none."""
    if args.exc_type is not SystemExit:
        die(args.exc_value or args.exc_type())


def _agent_config(options: Options, me: Member, scratch: Scratch) -> AgentConfig:
    return AgentConfig(
        me=me,
        run_id=options.run_id,
        role=options.role,
        workers=options.workers,
        scratch=scratch.path,
        snapshots=scratch.snapshots,
        log_dir=options.log_root / options.attempt / options.node,
        stacks_dir=options.record_dir / "stacks",
        max_restarts=options.elastic.max_restarts,
        hang_ceiling_s=options.elastic.hang_ceiling_s,
        start_ceiling_s=options.elastic.start_ceiling_s,
        hang_floor_s=options.elastic.hang_floor_s,
        watch_all=options.task.kind == "main",
        leaves_alone=options.leaves_alone,
    )


def build_client(
    options: Options,
    address: str,
    ports: range,
    *,
    secret: Secret,
    reactor: Reactor,
    store: EpochStore,
    log: EventLog,
    snapshot_port: int,
    notify: Callable[[], None],
) -> tuple[Member, MembershipClient]:
    """Listen for peers and return who this node is, and its place in the job."""
    endpoint = Endpoint(reactor, address, ports, badge=Badge(secret, "agents", options.run_id))
    elastic = options.elastic
    me = Member(
        agent_id=f"{options.node}-{os.getpid()}-{os.urandom(4).hex()}",
        node=options.node,
        host=options.host,
        address=address,
        port=endpoint.port,
        workers=healthy(options.workers, os.environ) if options.accelerators else options.workers,
        snapshot_port=snapshot_port,
    )
    settings = Settings(
        workers=options.workers,
        rung_nodes=options.rung_nodes,
        expected_nodes=options.rung_nodes[0],
        join_timeout_s=elastic.join_timeout_s,
        heartbeat_s=elastic.heartbeat_s,
        dead_after_s=elastic.dead_after_s,
        max_restarts=elastic.max_restarts,
        max_crashes=elastic.max_crashes,
        max_hangs=elastic.max_hangs,
        no_progress=elastic.no_progress,
        window_s=elastic.window_s,
        node_failures=elastic.node_failures,
        straggler=elastic.straggler,
    )

    def log_event(event: str, epoch: int | None, fields: dict[str, Any]) -> None:
        log.emit(event, epoch=epoch, **fields)

    client = MembershipClient(
        me=me,
        job=options.job,
        ready=False,
        readmit=options.readmit,
        settings=settings,
        board=open_board(
            options.board_dir,
            options.board,
            told=lambda reason: log.emit("board.damaged", reason=reason),
        ),
        endpoint=endpoint,
        reactor=reactor,
        open_store=store.open,
        log=log_event,
        notify=notify,
    )
    return me, client


if __name__ == "__main__":
    main()

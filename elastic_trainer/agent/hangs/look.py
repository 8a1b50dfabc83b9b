"""`python -m elastic_trainer.agent.hangs.look RUN`: what workers do on this node, as JSON.

For people, while the run continues (`holdfast stacks`): nothing is stopped. py-spy where it is
installed, and the workers' own word (faulthandler) where they can give it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from elastic_trainer.agent.hangs.stacks import StackTarget, gather_stacks
from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import of_each, read_regular

DEADLINE_S = 5.0
PIECE = 100
"""Characters of a text on one line.

srun hands on up to 1,024 bytes of a task at once (SLURM_IO_MAX_MSG_LEN in its io_hdr.h), and what
other nodes print may come between two such parts. A line with a piece is shorter: a character
takes 6 bytes at most, the other fields about 300.
"""
SCRATCH = Path("/dev/shm")  # noqa: S108  where agents keep heartbeats, see environment.py


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A live worker on this node."""

    rank: int
    pid: int
    epoch: int
    node: str
    heartbeat: Path


def find_workers(run_dir: Path, *, node: str | None) -> list[LiveWorker]:
    """Return the live workers of a run on this machine, by rank.

    The record says which process is which rank; the kernel says whether it is still that one.
    `node` is this node's name in the run; None: any, as on an emulated cluster.
    """
    run_id = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))["run_id"]
    paths = (run_dir / "nodes").glob(f"{node or '*'}.jsonl*")
    lines = (line for text in of_each(paths, read_regular) for line in text.splitlines())

    def workers(line: bytes) -> list[LiveWorker]:
        event = Event.decode(line.decode(errors="replace"))
        if event is None or event.epoch is None or event.node is None:
            return []
        found = []
        for local_rank, pid in enumerate(event.fields["pids"]):
            rank = event.fields["first_rank"] + local_rank
            if type(rank) is type(pid) is int and _is_of(pid, run_dir):
                name = f"{event.epoch}-{local_rank}.heartbeat"
                beats = SCRATCH.glob(f"holdfast-{run_id}-{event.node}-*/{name}")
                heartbeat = next(iter(beats), SCRATCH / name)
                found.append(LiveWorker(rank, pid, event.epoch, event.node, heartbeat))
        return found

    newest: dict[int, LiveWorker] = {}
    for found in of_each((line for line in lines if b'"workers.started"' in line), workers):
        for one in found:
            if one.rank not in newest or newest[one.rank].epoch < one.epoch:
                newest[one.rank] = one
    return [newest[rank] for rank in sorted(newest)]


def _is_of(pid: int, run_dir: Path) -> bool:
    """Return whether process `pid` was started for this run: ids are given away again.

    A program of its own has the run in its environment, a fork in the agent's command line.
    """
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    run = os.fsencode(run_dir)
    return b"HOLDFAST_RUN_DIR=" + run in environment or run in command


def look(
    run_dir: Path, *, env: Mapping[str, str], ranks: Collection[int]
) -> list[dict[str, object]]:
    """Return one mapping for each worker here: rank, pid, epoch, node, host, text."""
    found = find_workers(run_dir.resolve(), node=env.get("SLURMD_NODENAME") or env.get("POD_NAME"))
    found = [worker for worker in found if not ranks or worker.rank in ranks]
    targets = [StackTarget(rank=w.rank, pid=w.pid, heartbeat=w.heartbeat) for w in found]
    dump = gather_stacks(targets, deadline_s=DEADLINE_S, spy_too=True)
    return [
        {
            "rank": worker.rank,
            "pid": worker.pid,
            "epoch": worker.epoch,
            "node": worker.node,
            "host": socket.gethostname(),
            "text": dump.texts[f"rank{worker.rank}.txt"].decode(errors="replace"),
        }
        for worker in found
    ]


def lines_of(worker: Mapping[str, object]) -> Iterator[bytes]:
    """Return lines of JSON: each is `worker`, with a piece of its text."""
    text = str(worker["text"])
    for at in range(0, max(len(text), 1), PIECE):
        piece = dict(worker) | {"text": text[at : at + PIECE]}
        yield json.dumps(piece, ensure_ascii=False).encode() + b"\n"


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("ranks", type=int, nargs=-1)
def main(run_dir: Path, ranks: tuple[int, ...]) -> None:
    """Print lines of JSON for each worker of RANKS, or for all that are here."""
    for worker in look(run_dir, env=os.environ, ranks=ranks):
        sys.stdout.buffer.writelines(lines_of(worker))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""What the authentication of snapshot copies costs: one worker, one keeper, this machine.

Without it an image has a CRC-32, of zlib, in place of its MAC, and is passed over twice just so.
"""

from __future__ import annotations

import multiprocessing as mp
import shutil
import tempfile
import time
import zlib
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psutil
from common import OUT, machine, median, say, table, write_out

from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.state.snapshots import image as images
from elastic_trainer.state.snapshots.image import PAGE, Header, Image, encode_index, place
from elastic_trainer.state.snapshots.peer import KEEPER_LABEL, Authenticate, KeeperAddress, PeerLink
from elastic_trainer.worker.secret import KEY_BYTES, Badge, Secret, authenticate

KEY = bytes(KEY_BYTES)
MEMORY = Path("/dev/shm")  # noqa: S108  where images are


FORK = mp.get_context("fork")


def prove(*, server: bool) -> Authenticate:
    """Return one end's handshake."""
    badge = Badge(Secret(KEY), KEEPER_LABEL, "bench")
    return partial(authenticate, badge=badge, server=server, timeout_s=60.0)


def keep(directory: Path, pipe: Connection) -> None:
    """Body of the keeper's process."""
    keeper = Keeper(directory, "127.0.0.1", authenticate=prove(server=True), key=KEY)
    keeper.start()
    pipe.send(keeper.port)
    pipe.recv()


def crc(_key: bytes, data: memoryview) -> bytes:
    """Return a CRC-32 in the form of a MAC."""
    return zlib.crc32(data).to_bytes(images.MAC_BYTES, "big")


def one(mib: int, repeats: int) -> dict[str, float]:
    """Seal an image and leave a copy, again and again; return medians a GB."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=MEMORY))
    (root / "kept").mkdir()
    pipe, theirs = FORK.Pipe()
    keeper = FORK.Process(target=keep, args=(root / "kept", theirs), daemon=True)
    keeper.start()
    try:
        peer = KeeperAddress(node="b", address="127.0.0.1", port=pipe.recv())
        with PeerLink(peer, prove(server=False)) as link:
            image, header = _image(root / "own", mib << 20)
            there, here = psutil.Process(keeper.pid), psutil.Process()
            rows: list[tuple[float, float]] = []
            for _ in range(repeats + 1):
                begun, cpu = time.perf_counter(), _cpu_s(here) + _cpu_s(there)
                sealed = image.seal(header, KEY)
                with memoryview(image.map) as whole, whole[PAGE : header.total_bytes] as body:
                    link.put(sealed, 0, body)
                rows.append((time.perf_counter() - begun, _cpu_s(here) + _cpu_s(there) - cpu))
            image.close()
    finally:
        keeper.kill()
        keeper.join()
        shutil.rmtree(root, ignore_errors=True)
    wall_s, cpu_s = (median(list(column)) for column in zip(*rows[1:], strict=True))
    num_gb = (mib << 20) / 1e9
    return {"gb_a_s": round(num_gb / wall_s, 2), "cpu_s_a_gb": round(cpu_s / num_gb, 3)}


def _image(path: Path, num_bytes: int) -> tuple[Image, Header]:
    part: dict[str, Any] = {"name": "model.w", "dtype": "uint8", "offsets": (0,)}
    size = {"shape": (num_bytes,), "sizes": (num_bytes,), "num_bytes": num_bytes}
    parts, payload_bytes = place([part | size])
    index = encode_index(parts)
    sizes = {"index_bytes": len(index), "payload_bytes": payload_bytes}
    header = Header(epoch=1, step=1, rank=0, shard=0, num_shards=1, num_ranks=1, **sizes)
    image = Image(path, create_bytes=header.total_bytes)
    image.map[PAGE : PAGE + len(index)] = index
    return image, header


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@click.command(help=__doc__.split("\n")[0])
@click.option("--mib", default=512, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@OUT
def main(mib: int, repeats: int, out: Path | None) -> None:
    """Measure and print."""
    found = {"with": one(mib, repeats)}
    seal, matches = images.seal, images.matches
    images.seal, images.matches = crc, lambda key, data, sealed: crc(key, data) == sealed
    found["without"] = one(mib, repeats)
    images.seal, images.matches = seal, matches
    more = found["with"]["cpu_s_a_gb"] / found["without"]["cpu_s_a_gb"] - 1
    say(f"authentication costs {100 * more:+.1f}% of a copy's CPU")
    rows = [[name, *row.values()] for name, row in found.items()]
    header = ["authentication", "GB/s", "CPU s a GB, both ends"]
    write_out(f"copy of an image of {mib} MiB ({machine()})\n\n{table(header, rows)}", out)


if __name__ == "__main__":
    main()

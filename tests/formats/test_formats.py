"""What each version wrote is read by this one: all that it said, whatever was added since.

A folder a version, made by format_writers.py; never changed.
"""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
from format_writers import (
    ATTEMPT,
    CORPUS,
    FOLDER,
    KEY,
    T_UNIX,
    Ranks,
    config_map,
    current_version,
    group_of_one,
    write,
)

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState
from elastic_trainer.data.corpus import DataError, pin
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.sample_ledger import audit
from elastic_trainer.state.manifest import MANIFEST_NAME, Manifest
from elastic_trainer.state.snapshots import image as images
from launcher.fleet.node_ledger import NodeLedger
from launcher.node.attempt import pasts
from launcher.record import stop_request
from launcher.record.files import RunRecord
from launcher.record.summary import summarise
from launcher.runs.runs import read_submitted

VERSIONS = sorted(path.name for path in FOLDER.iterdir() if (path / "expected.json").is_file())
MOST_BYTES = 200_000


def test_this_version_has_a_folder():
    assert current_version() in VERSIONS, "python tests/formats/format_writers.py"


@pytest.fixture(params=VERSIONS)
def folder(request, tmp_path) -> Path:
    """A copy: readers may write."""
    copy = tmp_path / request.param
    shutil.copytree(FOLDER / request.param, copy, copy_function=shutil.copyfile)
    for each in (copy, *copy.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    return copy


@pytest.fixture
def expected(folder):
    return json.loads((folder / "expected.json").read_text())


def says(found, wanted) -> bool:
    """Whether all of `wanted` is in `found`; keys that were added since do not matter."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            key in found and says(found[key], each) for key, each in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(wanted)
            and all(map(says, found, wanted))
        )
    return type(found) is type(wanted) and found == wanted


def plain(found):
    """A dataclass, or a list or dict of them, as JSON has it."""
    if isinstance(found, list):
        return [plain(each) for each in found]
    if isinstance(found, dict):
        return {name: plain(each) for name, each in found.items()}
    return json.loads(json.dumps(asdict(found) if is_dataclass(found) else found))


def read_job(folder):
    names = {path: path.stem.removeprefix("job-") for path in folder.glob("job-*.json")}
    return {name: TrainConfig.from_json(path.read_text()) for path, name in names.items()}


def read_board(folder):
    return BoardState.decode(FileBoard(folder / "board", heal_s=0.0).get_state()[0])


def read_config_map(folder):
    return BoardState.decode(config_map(folder / "board-config-map.json").get_state()[0])


def read_fleet(folder):
    return NodeLedger(folder / "fleet", wall=lambda: T_UNIX + 9).entries()


def read_fleet_config_map(folder):
    places = (folder / f"fleet-config-map{who}.json" for who in ("", "-operators"))
    return NodeLedger(*map(config_map, places), wall=lambda: T_UNIX + 9).entries()


def read_manifest(folder):
    (saved,) = (folder / "run" / "checkpoints").iterdir()
    return Manifest.decode((saved / MANIFEST_NAME).read_bytes())


def read_samples(folder):
    files = sorted((folder / "run" / "ledger").iterdir())
    return audit((file.read_text().splitlines() for file in files), global_batch=4)


READERS = {
    "jobs": read_job,
    "board": read_board,
    "board as ConfigMap": read_config_map,
    "events": lambda folder: RunRecord(folder / "run").poll(),
    "manifest": read_manifest,
    "fleet": read_fleet,
    "fleet as ConfigMap": read_fleet_config_map,
    "samples": read_samples,
    "summary": lambda folder: summarise(RunRecord(folder / "story").poll(), code=0),
    "attempt": lambda folder: pasts(folder / "run", ATTEMPT)[0],
    "submission": lambda folder: read_submitted(folder / "run"),
}


@pytest.mark.parametrize("what", READERS)
def test_all_that_was_written_is_read(folder, expected, what):
    wanted = expected[what.removesuffix(" as ConfigMap")]
    found = plain(READERS[what](folder))
    assert says(found, wanted), (found, wanted)


def test_a_checkpoint_is_restored(folder, expected):
    with group_of_one() as log:
        ranks = Ranks(folder / "run", log)
        assert ranks.manager.restore() == 2
        assert ranks.tensors() == expected["checkpoint"]
        ranks.manager.close()


@pytest.mark.parametrize("way", ["gmac", "blake2b"])
def test_an_image_is_restored(folder, expected, way):
    if way == "gmac" and images._OPENSSL is None:
        pytest.skip("this Python cannot call OpenSSL, and all nodes have the same")
    image = images.Image(folder / f"image-{way}")
    header = image.verify(KEY)
    parts = [part._asdict() for part in image.index(header)]
    wanted = {**expected["image"], "mac": header.mac}
    assert says({**plain(header), "parts": parts}, wanted)
    payload = bytes(image.map[header.payload_at : header.total_bytes])
    assert (zlib.crc32(payload), image.committed) == (expected["payload_crc32"], True)
    image.close()


def test_what_says_yes_or_no(folder):
    assert stop_request.asked(folder / "run")
    pin(folder / "run" / "corpus.json", CORPUS, where="/elsewhere/text.txt")
    with pytest.raises(DataError):
        pin(folder / "run" / "corpus.json", {**CORPUS, "tokens": 1}, where="/data/text.txt")


def test_what_is_kept_is_small():
    for version in VERSIONS:
        files = (path for path in (FOLDER / version).rglob("*") if path.is_file())
        assert sum(path.stat().st_size for path in files) < MOST_BYTES


def test_what_is_written_today_is_read(tmp_path):
    """As the folder of the next version will be."""
    write(tmp_path / "next")
    expected = json.loads((tmp_path / "next" / "expected.json").read_text())
    for what, read in READERS.items():
        wanted = expected[what.removesuffix(" as ConfigMap")]
        assert says(plain(read(tmp_path / "next")), wanted), what

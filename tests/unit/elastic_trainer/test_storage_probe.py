from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from elastic_trainer.storage.storage_probe import StorageError, probe_storage


def test_a_disk_can_hold_a_run_and_nothing_is_left(tmp_path: Path) -> None:
    probe_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_no_hard_links(tmp_path: Path, number: int) -> None:
    def link(_file: Path, _second: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=f"HF617 {re.escape(str(tmp_path))} ") as caught:
        probe_storage(tmp_path, link=link)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number
    assert list(tmp_path.iterdir()) == []


def test_links_that_are_not_exclusive(tmp_path: Path) -> None:
    def link(file: Path, second: Path) -> None:
        second.write_bytes(file.read_bytes())

    with pytest.raises(StorageError, match=r"HF617 .*replaces"):
        probe_storage(tmp_path, link=link)


def test_users_that_the_server_squashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(StorageError, match=rf"HF617 .*user {mine + 1} .*user {mine}\b"):
        probe_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_modes_that_the_mount_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda self, _mode: real(self, 0o777))
    with pytest.raises(StorageError, match=r"HF617 .*mode 0777"):
        probe_storage(tmp_path)


def test_a_directory_that_cannot_be_written_is_for_the_next_writer(tmp_path: Path) -> None:
    probe_storage(tmp_path / "missing")


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("nfs4", "rw,vers=4.2,nocto,addr=10.0.0.1", True),
        ("nfs", "rw,nocto", True),
        ("nfs4", "rw,vers=4.2,lookupcache=pos,addr=10.0.0.1", False),
        ("ext4", "rw,nocto", False),
    ],
)
def test_nfs_must_ask_the_server_at_an_open(
    tmp_path: Path, kind: str, options: str, *, refused: bool
) -> None:
    run_dir, mounts = tmp_path / "run", tmp_path / "mountinfo"
    run_dir.mkdir()
    device = run_dir.stat().st_dev
    mounts.write_text(
        "22 1 0:1 / / rw,relatime shared:1 - nfs4 server:/a rw,nocto\n"
        f"36 22 {os.major(device)}:{os.minor(device)} / {run_dir} rw - {kind} server:/b {options}\n"
    )
    if refused:
        with pytest.raises(StorageError, match=r"HF617 .*nocto"):
            probe_storage(run_dir, mounts=mounts)
    else:
        probe_storage(run_dir, mounts=mounts)
    assert list(run_dir.iterdir()) == []

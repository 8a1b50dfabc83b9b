"""Look-ups through a client that remembers what was not there, as that of NFS does.

No machine of the tests has NFS. The client here follows fs/nfs/dir.c of Linux: an absence counts as
long as the directory's attributes, as the client last saw them, are those at which it was seen; to
open the directory is to fetch them; so is a change of one's own. They never expire here.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.open_board import ELSEWHERE, elsewhere
from elastic_trainer.board.state import Commit
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.manifest import FileEntry, Manifest
from elastic_trainer.state.storage import CheckpointStorage
from launcher.record import stop_request


class NfsClient:
    """This process's view of the files below `root`; within `elsewhere` that of the server."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._cached = str(root), True
        self._attributes: dict[str, object] = {}
        """Directory -> its attributes as last seen."""
        self._absent: dict[str, object] = {}
        """Path -> the attributes of its directory when it was not there."""
        self._listdir, self._stat = os.listdir, os.stat
        for module, name in ((os, "open"), (io, "open"), (os, "stat")):
            monkeypatch.setattr(module, name, self._looking_up(getattr(module, name)))
        monkeypatch.setattr(os, "listdir", self._list)
        for name in ("link", "rename", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._changing(getattr(os, name)))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Act on another machine."""
        self._cached = False
        yield
        self._cached = True

    def _fetch(self, folder: str) -> None:
        self._attributes[folder] = tuple(sorted(self._listdir(folder)))

    def _mine(self, path: Any) -> bool:
        return self._cached and isinstance(path, str | Path) and str(path).startswith(self._root)

    def _looking_up(self, real: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not self._mine(path):
                return real(path, *args, **options)
            text, folder = str(path), str(Path(path).parent)
            creates = args and isinstance(args[0], int) and args[0] & os.O_CREAT
            creates = creates or (args and isinstance(args[0], str) and args[0][0] in "wxa")
            seen_at = self._absent.get(text)
            if not creates and seen_at is not None and seen_at == self._attributes.get(folder):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", text)
            try:
                opened = real(path, *args, **options)
            except FileNotFoundError:
                if folder not in self._attributes and folder.startswith(self._root):
                    self._fetch(folder)
                self._absent[text] = self._attributes.get(folder)
                raise
            if args and args[0] is not None and isinstance(args[0], int):
                if args[0] & os.O_DIRECTORY:
                    self._fetch(text)
                elif creates:
                    self._fetch(folder)
            return opened

        return call

    def _changing(self, real: Any) -> Any:
        def call(*paths: Any, **options: Any) -> Any:
            try:
                return real(*paths, **options)
            finally:
                for path in filter(self._mine, paths):
                    self._absent.pop(str(path), None)
                    self._fetch(str(Path(path).parent))

        return call

    def _list(self, folder: Any = ".") -> list[str]:
        if self._mine(folder):
            self._fetch(str(folder))
        return self._listdir(folder)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NfsClient:
    return NfsClient(tmp_path, monkeypatch)


def test_the_client_remembers_what_was_not_there(client: NfsClient, tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert not path.exists()
    with client.elsewhere():
        path.write_text("x")
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        path.read_text()
    os.close(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    assert path.read_text() == "x"


def test_a_request_to_stop_is_seen_by_who_looked_before(client: NfsClient, tmp_path: Path) -> None:
    assert not stop_request.asked(tmp_path)
    with client.elsewhere():
        stop_request.ask(tmp_path, why="holdfast cancel", t_unix=0.0)
    assert stop_request.asked(tmp_path)


def test_a_board_elsewhere_is_seen_by_who_looked_before(client: NfsClient, tmp_path: Path) -> None:
    assert elsewhere(tmp_path) is None
    with client.elsewhere():
        (tmp_path / ELSEWHERE).write_text("kubernetes://space/name\n")
    assert elsewhere(tmp_path) == "kubernetes://space/name"


def test_beats_on_the_board_are_seen_as_they_come(client: NfsClient, tmp_path: Path) -> None:
    reader, writer = FileBoard(tmp_path / "board"), FileBoard(tmp_path / "board")
    token = None
    for beat in range(5):
        with client.elsewhere():
            swapped = writer.set_state(b"%d" % beat, token)
        assert swapped is not None
        token = swapped[1]
        assert reader.get_state() == (b"%d" % beat, token)
        assert reader.get_state() == (b"%d" % beat, token)  # it has looked for the next in vain


def test_a_swap_upon_a_version_that_is_not_the_newest_is_lost(
    client: NfsClient, tmp_path: Path
) -> None:
    mine, theirs = FileBoard(tmp_path / "board"), FileBoard(tmp_path / "board")
    mine.set_state(b"1")
    assert mine.get_state() == (b"1", 1)
    with client.elsewhere():
        theirs.set_state(b"2", 1)
    assert mine.set_state(b"other", 1) == (b"2", 2, False)


def test_a_checkpoint_is_not_missing_to_who_looked_too_early(
    client: NfsClient, tmp_path: Path
) -> None:
    (tmp_path / "step-1").mkdir()
    storage = CheckpointStorage(tmp_path)
    content = b"0123456789"
    entry = FileEntry(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest = Manifest(
        run_id="r",
        epoch=0,
        step=1,
        consumed_samples=1,
        layout="dp1",
        world_size=1,
        files={"__0_0.distcp": entry},
    )
    commit = Commit(epoch=0, step=1, dir="step-1", manifest_sha256="")
    with pytest.raises(DamagedError):
        storage.read_manifest(commit)
    with pytest.raises(DamagedError):
        storage.verify("step-1", manifest, manifest.files)
    with client.elsewhere():
        (tmp_path / "step-1" / "__0_0.distcp").write_bytes(content)
        digest = storage.write_manifest("step-1", manifest)
    storage.verify("step-1", manifest, manifest.files)
    assert storage.read_manifest(replace(commit, manifest_sha256=digest)) == manifest

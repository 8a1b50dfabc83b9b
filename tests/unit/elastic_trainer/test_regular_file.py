"""Files of others: plain ones, and no more of them than is asked for."""

from __future__ import annotations

import errno
import os

import pytest

from elastic_trainer.storage.files import open_regular, read_regular


def test_plain_files_and_links_to_them_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b", 3) == b"abc"


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "folder", "nothing"])
def test_all_else_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "x"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
    with pytest.raises(OSError, match="x"):
        open_regular(path)


def test_what_is_too_long_is_refused_unread(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match=rf"Errno {errno.EFBIG}\b.*1,000"):
        read_regular(path, 1000)

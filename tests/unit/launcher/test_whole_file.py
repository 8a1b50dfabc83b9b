from __future__ import annotations

from pathlib import Path

import pytest

from launcher.whole_file import read_json, write_json, write_whole


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": ["ä"]}, indent=1)
    assert read_json(path) == {"b": ["ä"]}
    assert path.read_text().endswith("}\n")
    assert list(tmp_path.iterdir()) == [path]


def test_when_it_cannot_be_written_the_former_one_stays_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "former")

    def full(self, text, **_):
        self.touch()
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "3", b"\xff"])
def test_what_is_no_object_is_empty(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_json(path) == {}

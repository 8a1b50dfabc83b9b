from __future__ import annotations

import os
import secrets

import pytest

from elastic_trainer.storage.files import publish, read_json, write_atomic, write_json, write_new


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": ["ä"]}, indent=1)
    assert read_json(path) == {"b": ["ä"]}
    assert path.read_text().endswith("}\n")
    assert list(tmp_path.iterdir()) == [path]


def test_when_it_cannot_be_written_the_former_one_stays_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "former")

    def full(_fd, _content):
        raise OSError("no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_names_that_are_not_there_yet_cannot_be_foreseen(tmp_path, monkeypatch):
    path, names = tmp_path / "a.json", []
    real = os.open

    def noted(name, flags, *rest):
        if flags & os.O_CREAT:
            names.append(os.path.basename(name))  # noqa: PTH119
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", noted)
    write_atomic(path, "1")
    write_atomic(path, "2")
    publish(tmp_path / "b", b"3")
    assert len(set(names)) == 3
    assert all(str(os.getpid()) != name.split(".")[-1] and len(name) > 32 for name in names)


@pytest.mark.parametrize("write", [write_atomic, publish])
@pytest.mark.parametrize("leads_to", ["there", "nowhere"])
def test_a_link_in_the_way_is_never_followed(tmp_path, monkeypatch, write, leads_to):
    """Should somebody guess the name all the same."""
    victim = tmp_path / "there"
    victim.write_text("precious")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".a-guessed").symlink_to(tmp_path / leads_to)
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", b"x")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "a").exists()


def test_a_published_file_is_never_replaced(tmp_path):
    assert publish(tmp_path / "a", b"1")
    assert not publish(tmp_path / "a", b"2")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"1"]
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"2")


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "3", b"\xff"])
def test_what_is_no_object_is_empty(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_json(path) == {}

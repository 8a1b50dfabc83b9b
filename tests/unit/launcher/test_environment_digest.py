"""The environment of a run: described, recorded, told apart."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from launcher.record.files import RunRecord
from launcher.runs.submitting.environment import (
    MAX_CHANGES,
    changes,
    describe,
    load_environment,
    note_environment,
    warn_if_changed,
)
from launcher.spec.errors import UserError


def install(venv, name, version, record="a.py,sha256=1,1\n"):
    site = venv / "lib" / "python3.11" / "site-packages"
    for old in site.glob(f"{name}-*"):
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)


@pytest.fixture
def venv(tmp_path):
    folder = tmp_path / "a venv"
    folder.mkdir()
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    install(folder, "torch", "2.13.0")
    install(folder, "My_Pkg", "1.0")
    return folder


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def recorded(run_dir, venv):
    """A run that has recorded the environment `venv`."""
    note_environment(run_dir, describe(venv=venv, image=None))
    return run_dir


def events(run_dir):
    record = RunRecord(run_dir)
    record.poll()
    return [(event.event, event.fields) for event in record.events]


def test_a_venv_is_described_without_running_it(venv):
    found = describe(venv=venv, image=None)
    assert found.python == "3.11.2"
    assert {name: text.split()[0] for name, text in found.distributions.items()} == {
        "my-pkg": "1.0",
        "torch": "2.13.0",
    }
    assert found == describe(venv=venv, image=None)


def test_the_launchers_own_environment():
    found = describe(venv=None, image=None)
    assert found.python == platform.python_version()
    assert found.prefix == sys.prefix
    assert "pytest" in found.distributions


def test_the_digest_does_not_depend_on_the_place(venv, tmp_path):
    before = describe(venv=venv, image=None)
    moved = venv.rename(tmp_path / "elsewhere")
    assert describe(venv=moved, image=None).digest == before.digest


def test_changes_are_named(venv):
    before = describe(venv=venv, image=None)
    install(venv, "torch", "2.13.1")
    install(venv, "My_Pkg", "1.0", record="a.py,sha256=2,1\n")
    install(venv, "new", "3")
    now = describe(venv=venv, image=None)
    assert now.digest != before.digest
    again, *others = changes(before, now)
    assert again.startswith("my-pkg 1.0 ")
    assert others == ["new none -> 3", "torch 2.13.0 -> 2.13.1"]


def test_a_change_at_a_restart_is_an_event(venv, recorded):
    assert warn_if_changed(recorded) == []
    install(venv, "torch", "2.14.0")
    assert warn_if_changed(recorded) == ["torch 2.13.0 -> 2.14.0"]
    (first, said), (second, fields) = events(recorded)
    assert first == "environment.recorded"
    assert second == "environment.changed"
    assert fields["was"] == said["digest"] != fields["digest"]
    assert fields["changes"] == ["torch 2.13.0 -> 2.14.0"]


def test_an_environment_that_is_gone_is_told_and_stops_nothing(venv, recorded):
    venv.rename(venv.with_name("gone"))
    (said,) = warn_if_changed(recorded)
    assert str(venv) in said
    assert events(recorded)[-1][0] == "environment.changed"


def test_long_lists_are_cut(venv, recorded):
    for index in range(MAX_CHANGES + 5):
        install(venv, f"p{index}", "1")
    assert len(warn_if_changed(recorded)) == MAX_CHANGES + 5
    fields = events(recorded)[-1][1]
    assert len(fields["changes"]) == MAX_CHANGES
    assert fields["more"] == 5


def test_nothing_recorded_is_nothing_to_compare(run_dir):
    assert warn_if_changed(run_dir) == []
    assert load_environment(run_dir) is None


def test_a_damaged_record_is_told(run_dir):
    (run_dir / "environment.json").write_text(json.dumps({"x": 1}))
    (said,) = warn_if_changed(run_dir)
    assert "environment.json" in said


def test_images(tmp_path, run_dir):
    pinned = "registry.local/t@sha256:" + "0" * 64
    assert describe(venv=None, image=pinned).image_digest == "sha256:" + "0" * 64
    tag = describe(venv=None, image="registry.local/t:1.0")
    assert (tag.image_digest, tag.python, tag.prefix) == (None, "", None)
    file = tmp_path / "image.sqsh"
    file.write_bytes(b"1" * 5_000_000)
    before = describe(venv=None, image=str(file))
    note_environment(run_dir, before)
    assert warn_if_changed(run_dir) == []
    file.write_bytes(b"2" * 5_000_000)
    assert ["image's digest" in text for text in warn_if_changed(run_dir)] == [True]


def test_a_missing_venv_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        describe(venv=tmp_path / "no", image=None)
    assert error.value.code == "HF201"


def test_a_prefix_without_a_pyvenv_cfg(tmp_path):
    install(tmp_path, "torch", "2")
    assert describe(venv=Path(tmp_path), image=None).python == "3.11"

from __future__ import annotations

import grp
import os
import stat

import pytest

from launcher.runs import run_dir as run_dirs
from launcher.spec.errors import UserError


def test_the_umask_holds_while_it_is_asked_for(tmp_path):
    before = os.umask(0o022)
    os.umask(before)
    with run_dirs.umask("0077"):
        (tmp_path / "a").write_text("x")
    with run_dirs.umask(None):
        (tmp_path / "b").write_text("x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o666 & ~before


def test_the_umask_is_put_back_after_a_failure():
    before = os.umask(0o022)
    os.umask(before)
    with pytest.raises(ZeroDivisionError), run_dirs.umask("0777"):
        raise ZeroDivisionError
    assert os.umask(before) == before


def test_a_run_directory_hands_its_group_on(tmp_path):
    groups = {os.getegid(), *os.getgroups()}
    others = [g.gr_gid for g in grp.getgrall() if g.gr_gid in groups and g.gr_gid != os.getegid()]
    if os.geteuid() == 0:
        others = [g.gr_gid for g in grp.getgrall() if g.gr_gid]
    if not others:
        pytest.skip("this user is in one group only")
    run_dir = tmp_path / "runs" / "r"
    run_dirs.make_run_dir(run_dir, group=grp.getgrgid(others[0]).gr_name)
    (run_dir / "events").mkdir()
    (run_dir / "events" / "e").write_text("x")
    assert [p.stat().st_gid for p in (run_dir, *run_dir.rglob("*"))] == [others[0]] * 3


def test_no_group_changes_nothing(tmp_path):
    run_dirs.make_run_dir(tmp_path / "r", group=None)
    assert not (tmp_path / "r").stat().st_mode & stat.S_ISGID


def test_a_group_that_is_not_there(tmp_path):
    with pytest.raises(UserError) as error:
        run_dirs.make_run_dir(tmp_path / "r", group="no-such-group")
    assert error.value.code == "HF643"
    assert not (tmp_path / "r").exists()


def test_a_group_that_the_user_is_not_in(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", list)
    other = next(g.gr_name for g in grp.getgrall() if g.gr_gid != os.getegid())
    with pytest.raises(UserError, match=rf"HF643.* {other}"):
        run_dirs.check_group(other)


@pytest.fixture
def others(monkeypatch):
    """Make what is this user's another user's."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o2770])
def test_a_run_directory_of_ones_own_is_used(tmp_path, mode):
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    run_dir.chmod(mode)
    run_dirs.create(run_dir, {"job.json": "{}"})
    assert (run_dir / "job.json").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_a_parent_that_all_may_write_must_be_sticky(tmp_path, existed):
    parent = tmp_path / "all"
    parent.mkdir()
    run_dir = parent / "mine" / "r"
    if existed:
        run_dir.mkdir(parents=True)
    parent.chmod(0o777)
    with pytest.raises(UserError, match=f"HF616.*{parent} has mode 0777") as error:
        run_dirs.create(run_dir, {"job.json": "{}"})
    assert error.value.code == "HF616"
    assert run_dir.exists() == existed
    parent.chmod(0o1777)
    run_dirs.create(run_dir, {"job.json": "{}"})


def test_a_run_directory_that_all_may_write_is_refused(tmp_path):
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with pytest.raises(UserError) as error:
        run_dirs.create(run_dir, {"job.json": "{}"})
    assert error.value.code == "HF616"
    with run_dirs.umask("0000"), pytest.raises(UserError) as error:
        run_dirs.create(tmp_path / "fresh", {"job.json": "{}"})
    assert error.value.code == "HF616"
    assert not list(run_dir.iterdir())
    assert not list((tmp_path / "fresh").iterdir())


@pytest.mark.usefixtures("others")
def test_a_run_directory_of_another_user_is_refused(tmp_path):
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    with pytest.raises(UserError, match=r"HF616.* 12345"):
        run_dirs.create(run_dir, {"job.json": "{}"})
    assert not list(run_dir.iterdir())


def test_a_link_to_a_folder_that_all_may_change_is_followed_for_the_check(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "r").mkdir()
    (tmp_path / "all").chmod(0o777)
    (tmp_path / "r").symlink_to(tmp_path / "all" / "r")
    with pytest.raises(UserError) as error:
        run_dirs.create(tmp_path / "r", {"job.json": "{}"})
    assert error.value.code == "HF616"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_real_folder_of_another_user_is_refused(tmp_path):
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    os.chown(run_dir, 12345, -1)
    with pytest.raises(UserError, match=r"HF616.* 12345"):
        run_dirs.write_bundle(run_dir, {"job.json": "{}"})

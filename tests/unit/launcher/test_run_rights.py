from __future__ import annotations

import grp
import os
import stat

import pytest

from launcher.errors import UserError
from launcher.ops import permissions


def test_the_umask_holds_while_it_is_asked_for(tmp_path):
    before = os.umask(0o022)
    os.umask(before)
    with permissions.umask("0077"):
        (tmp_path / "a").write_text("x")
    with permissions.umask(None):
        (tmp_path / "b").write_text("x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o666 & ~before


def test_the_umask_is_put_back_after_a_failure():
    before = os.umask(0o022)
    os.umask(before)
    with pytest.raises(ZeroDivisionError), permissions.umask("0777"):
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
    permissions.make_run_dir(run_dir, group=grp.getgrgid(others[0]).gr_name)
    (run_dir / "events").mkdir()
    (run_dir / "events" / "e").write_text("x")
    assert [p.stat().st_gid for p in (run_dir, *run_dir.rglob("*"))] == [others[0]] * 3


def test_no_group_changes_nothing(tmp_path):
    permissions.make_run_dir(tmp_path / "r", group=None)
    assert not (tmp_path / "r").stat().st_mode & stat.S_ISGID


def test_a_group_that_is_not_there(tmp_path):
    with pytest.raises(UserError) as error:
        permissions.make_run_dir(tmp_path / "r", group="no-such-group")
    assert error.value.code == "HF643"
    assert not (tmp_path / "r").exists()


def test_a_group_that_the_user_is_not_in(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", list)
    other = next(g.gr_name for g in grp.getgrall() if g.gr_gid != os.getegid())
    with pytest.raises(UserError, match="is not in group") as error:
        permissions.check_group(other)
    assert error.value.code == "HF643"

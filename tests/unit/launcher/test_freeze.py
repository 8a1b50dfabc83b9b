"""What is frozen, how it is recorded, and that the run points at it."""

from __future__ import annotations

import fnmatch
import json
import os
import stat
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.config import TrainConfig
from launcher.plan.planning import plan
from launcher.record.files import RunRecord
from launcher.render.local import render_local
from launcher.runs import run_dir as run_dirs
from launcher.runs.submitting.freeze import (
    ALWAYS_EXCLUDED,
    SECRET_FILES,
    freeze_code,
    left_out,
    list_code,
    load_frozen,
    remove_frozen,
    survey,
    upgrade,
    use_code,
)
from launcher.spec.errors import UserError
from launcher.spec.sections import Code

AUTHOR = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
SCRIPT = ("command=train.py --lr 0.1",)


def git(folder, *args):
    env = {**os.environ, **AUTHOR}
    done = subprocess.run(["git", "-C", folder, *args], check=True, capture_output=True, env=env)
    return done.stdout.decode()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "my code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("print('old')\n")
    (folder / "pkg" / "model.py").write_text("x = 1\n")
    return folder


@pytest.fixture
def repository(source):
    (source / ".gitignore").write_text("*.so\nruns/\n")
    git(source, "init", "-q", "-b", "main")
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "first")
    return source


@pytest.fixture
def make_run(make_spec, tmp_path):
    """Return a function that makes a rendered run of a job beside some code."""

    def make(source, *sets, name="run"):
        spec = make_spec(*(sets or SCRIPT))
        run_dir = tmp_path / name
        files = survey(spec, base_dir=source, run_dir=run_dir)
        bundle = render_local(spec, plan(spec), run_id=name, run_dir=run_dir, base_dir=source)
        run_dirs.create(run_dir, bundle)
        return run_dir, files

    return make


@pytest.fixture
def freeze(make_run):
    """Return a function that makes a run of some code and freezes that."""

    def make(source, *sets, wall=time.time):
        run_dir, files = make_run(source, *sets)
        return run_dir, freeze_run(run_dir, files, wall=wall)

    return make


def freeze_run(run_dir, files, wall=time.time):
    frozen = freeze_code(run_dir, files, wall=wall)
    use_code(run_dir, frozen)
    return frozen


@contextmanager
def refused(code, *words):
    """See that what is done inside is refused by this code, and says so."""
    with pytest.raises(UserError) as error:
        yield
    assert error.value.code == code
    assert [word for word in words if word not in str(error.value)] == []


def job(run_dir):
    return TrainConfig.from_json((run_dir / "job.json").read_text())


def events(run_dir):
    record = RunRecord(run_dir)
    record.poll()
    return [(event.event, event.fields) for event in record.events]


def test_a_run_points_at_a_read_only_copy(source, freeze):
    run_dir, frozen = freeze(source, wall=lambda: 5.0)
    copy = run_dir / "code" / frozen.digest[:16]
    assert (copy / "train.py").read_text() == "print('old')\n"
    assert job(run_dir).command_dir == str(copy) == frozen.dir == job(run_dir).code.dir
    assert job(run_dir).code.source == str(source)
    assert [path for path in (copy, *copy.rglob("*")) if path.lstat().st_mode & 0o222] == []
    assert (frozen.num_files, frozen.size_bytes) == (2, 19)
    assert (frozen.revision, frozen.dirty, frozen.frozen_unix) == (None, None, 5.0)
    ((name, fields),) = events(run_dir)
    assert name == "code.frozen"
    assert fields["digest"] == frozen.digest
    assert fields["files"] == 2
    assert fields["bytes"] == 19
    assert load_frozen(run_dir) == (frozen, ())


def test_later_edits_change_nothing_until_an_upgrade(source, freeze):
    run_dir, before = freeze(source)
    (source / "train.py").write_text("print('new')\n")
    assert Path(job(run_dir).command_dir, "train.py").read_text() == "print('old')\n"
    was, now = upgrade(run_dir)
    assert was == before
    assert now.digest != before.digest
    assert Path(job(run_dir).command_dir, "train.py").read_text() == "print('new')\n"
    assert Path(before.dir, "train.py").read_text() == "print('old')\n"
    assert load_frozen(run_dir) == (now, (before,))
    name, fields = events(run_dir)[-1]
    assert name == "code.upgraded"
    assert (fields["was"], fields["digest"]) == (before.digest, now.digest)


def test_an_upgrade_without_changes_does_nothing(source, freeze):
    run_dir, before = freeze(source)
    assert upgrade(run_dir) == (before, before)
    assert [name for name, _ in events(run_dir)] == ["code.frozen"]
    assert len(list((run_dir / "code").iterdir())) == 1


def test_the_job_as_rendered_is_pointed_there_too(source, make_run):
    run_dir, files = make_run(source)
    rendered = run_dirs.load(run_dir)
    run_dirs.write_attempt(run_dir, rendered, rendered)
    frozen = freeze_run(run_dir, files)
    assert run_dirs.load(run_dir).command_dir == job(run_dir).command_dir == frozen.dir


@pytest.mark.parametrize("name", ["my code", "link"])
def test_an_absolute_script_of_the_folder_is_run_from_the_copy(source, freeze, tmp_path, name):
    (tmp_path / "link").symlink_to(source)
    folder = tmp_path / name
    data = f"{folder}/data.bin"
    run_dir, frozen = freeze(
        source, f"command=['{folder}/train.py','{data}']", f"code.dir={folder}"
    )
    assert job(run_dir).command == ("train.py", data)
    assert job(run_dir).command_dir == frozen.dir


def test_the_built_in_trainer_needs_no_code(source, make_spec):
    assert survey(make_spec(), base_dir=source, run_dir=source / "r") is None
    files = survey(make_spec("code.dir=."), base_dir=source, run_dir=source / "r")
    assert files.names == ("pkg/model.py", "train.py")


def test_a_run_without_frozen_code_cannot_be_upgraded(tmp_path):
    with refused("HF642"):
        upgrade(tmp_path)


def test_the_patch_makes_the_copy_from_the_revision(repository, freeze, tmp_path):
    (repository / "train.py").write_text("print('edited')\n")
    (repository / "new é.bin").write_bytes(bytes(range(256)))
    (repository / "excluded.ckpt").write_text("large")
    (repository / "pkg" / "model.py").unlink()
    run_dir, frozen = freeze(repository, *SCRIPT, "code.exclude=['*.ckpt']")
    assert (frozen.dirty, frozen.branch, frozen.num_untracked) == (True, "main", 2)
    assert frozen.revision == git(repository, "rev-parse", "HEAD").strip()
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(repository), str(again))
    git(again, "apply", str(run_dir / "code" / frozen.patch))
    listed = {path.name: path.read_bytes() for path in again.iterdir() if path.is_file()}
    copied = {path.name: path.read_bytes() for path in Path(frozen.dir).iterdir() if path.is_file()}
    assert listed == copied
    assert "new é.bin" in copied
    assert stat.S_IMODE((run_dir / "code" / frozen.patch).stat().st_mode) == 0o400


def test_freezing_leaves_the_repository_as_it_was(repository, freeze):
    (repository / "untracked.py").write_text("y = 2\n")

    def state():
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in (repository / ".git").rglob("*")
            if path.is_file()
        }

    before = state()
    assert freeze(repository)[1].num_untracked == 1
    assert state() == before


def test_a_clean_repository_has_no_patch(repository, freeze):
    run_dir, frozen = freeze(repository)
    assert (frozen.dirty, frozen.patch) == (False, None)
    assert [path.name for path in (run_dir / "code").iterdir()] == [frozen.digest[:16]]


def test_git_ignores_and_includes(repository):
    (repository / "ext.so").write_bytes(b"elf")
    (repository / "runs").mkdir()
    (repository / "runs" / "big").write_bytes(b"0" * 4096)
    assert list_code(repository, Code()).names == (".gitignore", "pkg/model.py", "train.py")
    assert "ext.so" in list_code(repository, Code(include=["*.so"])).names


def test_a_folder_of_a_repository_is_frozen_alone(repository, freeze):
    (repository / "pkg" / "model.py").write_text("x = 2\n")
    run_dir, frozen = freeze(repository / "pkg", "command=model.py")
    assert [path.name for path in Path(frozen.dir).iterdir()] == ["model.py"]
    assert frozen.dirty is True
    patch = (run_dir / "code" / frozen.patch).read_text()
    assert "a/model.py" in patch
    assert "+x = 2" in patch


def test_a_folder_that_its_repository_ignores_is_walked(repository):
    inner = repository / "runs" / "mine"
    inner.mkdir(parents=True)
    (inner / "train.py").write_text("z = 3\n")
    files = list_code(inner, Code())
    assert (files.names, files.about.dirty) == (("train.py",), None)


def test_files_of_a_submodule_are_code(repository, tmp_path):
    other = tmp_path / "lib"
    other.mkdir()
    (other / "lib.py").write_text("l = 1\n")
    git(other, "init", "-q", "-b", "main")
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "lib")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "lib")
    git(repository, "commit", "-q", "-m", "with lib")
    assert list_code(repository, Code()).about.dirty is False
    (repository / "lib" / "new.py").write_text("l = 2\n")
    files = list_code(repository, Code())
    assert {"lib/lib.py", "lib/new.py"} < set(files.names)
    assert files.about.dirty is True
    assert not any(".git/" in name for name in files.names)


@pytest.mark.parametrize("link", [True, False])
def test_a_tracked_folder_may_be_a_link_or_a_file_now(repository, freeze, tmp_path, link):
    moved = (repository / "pkg").rename(tmp_path / "moved")
    if link:
        (repository / "pkg").symlink_to(moved)
    else:
        (repository / "pkg").write_text("")
    _, frozen = freeze(repository)
    assert sorted(path.name for path in Path(frozen.dir).iterdir()) == [
        ".gitignore",
        "pkg",
        "train.py",
    ]
    assert Path(frozen.dir, "pkg").is_symlink() == link


def test_a_repository_without_a_commit(source, freeze):
    git(source, "init", "-q", "-b", "main")
    _, frozen = freeze(source)
    assert (frozen.revision, frozen.dirty, frozen.num_untracked) == (None, True, 2)


def test_it_works_without_git(repository, freeze, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (repository / "ext.so").write_bytes(b"elf")
    _, frozen = freeze(repository)
    assert (frozen.revision, frozen.dirty, frozen.patch) == (None, None, None)
    # Nobody reads .gitignore then.
    names = list_code(repository, Code()).names
    assert names == (".gitignore", "ext.so", "pkg/model.py", "train.py")


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ((), ("pkg/data/x.bin", "pkg/model.py", "train.py")),
        (("data",), ("pkg/model.py", "train.py")),
        (("data/",), ("pkg/model.py", "train.py")),
        (("./pkg/data",), ("pkg/model.py", "train.py")),
        (("pkg",), ("train.py",)),
        (("*.bin", "train.*"), ("pkg/model.py",)),
        (("pkg/*.py",), ("pkg/data/x.bin", "train.py")),
        (("[",), ("pkg/data/x.bin", "pkg/model.py", "train.py")),
    ],
)
@pytest.mark.parametrize("under_git", [False, True])
def test_excludes(source, exclude, names, under_git):
    (source / "pkg" / "data").mkdir()
    (source / "pkg" / "data" / "x.bin").write_bytes(b"1")
    if under_git:
        git(source, "init", "-q", "-b", "main")
        git(source, "add", "-A")
    assert list_code(source, Code(exclude=exclude)).names == names


def test_caches_environments_and_runs_are_never_code(source, tmp_path):
    for name in ("__pycache__", ".git", "node_modules", "venv", "runs/r1", "runs/s/code", "here"):
        (source / name).mkdir(parents=True)
        (source / name / "file").write_text("x")
    (source / "venv" / "pyvenv.cfg").write_text("")
    (source / "runs" / "s" / "sweep.json").write_text("{}")
    (source / "runs" / "r1" / "job.json").write_text("{}")
    (source / "runs" / "r1" / "events").mkdir()
    (source / "pkg" / "m.pyc").write_text("")
    files = list_code(source, Code(), skip=[source / "here", tmp_path / "elsewhere", source])
    assert files.names == ("pkg/model.py", "train.py")


def test_links(source, freeze, tmp_path):
    (tmp_path / "corpus").mkdir()
    (source / "pkg" / "main").symlink_to("../train.py")
    (source / "absolute").symlink_to(source / "train.py")
    (source / "data").symlink_to("../corpus")
    (source / "loop").symlink_to("loop")
    _, frozen = freeze(source)
    copy = Path(frozen.dir)
    assert str((copy / "pkg" / "main").readlink()) == "../train.py"
    assert str((copy / "absolute").readlink()) == "train.py"
    assert str((copy / "data").readlink()) == str(tmp_path / "corpus")
    assert str((copy / "loop").readlink()) == "loop"


def test_rights_are_kept_but_for_writing(source, freeze):
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "key").write_text("secret")
    (source / "key").chmod(0o600)
    _, frozen = freeze(source)
    copy = Path(frozen.dir)
    assert stat.S_IMODE((copy / "run.sh").stat().st_mode) == 0o555
    assert stat.S_IMODE((copy / "key").stat().st_mode) == 0o400


def test_what_is_no_file_is_left_out_and_told(source, freeze):
    os.mkfifo(source / "pipe")
    assert freeze(source)[1].skipped == ("pipe",)


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("code.max_mib=2", "HF640", ("3 MiB", "corpus.bin", "code.exclude")),
        ("code.dir=gone", "HF201", ("gone",)),
    ],
)
def test_what_cannot_be_frozen_is_refused(source, make_spec, value, code, words):
    (source / "corpus.bin").write_bytes(b"\0" * (3 << 20))
    spec = make_spec(*SCRIPT, value)
    with refused(code, *words):
        survey(spec, base_dir=source, run_dir=source / "r")


def test_too_many_files_are_refused(source, monkeypatch):
    monkeypatch.setattr("launcher.runs.submitting.freeze.MAX_FILES", 1)
    with refused("HF640", "2 files", "pkg (1 file)"):
        list_code(source, Code())


def test_a_file_that_vanishes_leaves_nothing_half_copied(source, make_run):
    run_dir, files = make_run(source)
    before = (run_dir / "job.json").read_text()
    (source / "train.py").unlink()
    with refused("HF641"):
        freeze_run(run_dir, files)
    assert list((run_dir / "code").iterdir()) == []
    assert (run_dir / "job.json").read_text() == before


def test_a_damaged_record_is_told(source, freeze):
    run_dir, _ = freeze(source)
    (run_dir / "code.json").write_text(json.dumps({"digest": 1}))
    with refused("HF613"):
        load_frozen(run_dir)


NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1)


@given(
    names=st.sets(
        NAMES.filter(
            lambda name: name not in {".", "..", ".git", ".gitignore"} and len(name.encode()) < 200
        ),
        max_size=5,
    ),
    under_git=st.booleans(),
)
def test_any_file_name_is_copied(tmp_path_factory, names, under_git):
    base = tmp_path_factory.mktemp("names")
    source, run_dir = base / "code", base / "run"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(name.encode())
    if under_git:
        git(source, "init", "-q", "-b", "main")
    files = list_code(source, Code())
    for name in names - set(files.names):
        never_copied = (*ALWAYS_EXCLUDED, *SECRET_FILES)
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in never_copied)
    frozen = freeze_code(run_dir, files)
    copied = {path.name: path.read_bytes() for path in Path(frozen.dir).iterdir()}
    assert copied == {name: name.encode() for name in files.names}
    remove_frozen(Path(frozen.dir))
    assert not Path(frozen.dir).exists()


SECRETS = [".env", ".env.local", "prod.env", "id_rsa", "id_ed25519", "tls.pem", "tls.key", ".netrc",
           "kubeconfig", ".git-credentials", ".npmrc", ".pypirc"]  # fmt: skip


def with_secrets(source):
    for name in [
        *SECRETS,
        "train.py",
        ".env.example",
        "pkg/.env",
        ".aws/credentials",
        ".ssh/config",
    ]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("TOKEN=s3cretive\n")


@pytest.mark.parametrize("tracked", [True, False])
def test_keys_and_passwords_are_not_frozen_and_that_is_said(source, freeze, tracked):
    with_secrets(source)
    if tracked:
        git(source, "init", "-q", "-b", "main")
        git(source, "add", "-A")
        git(source, "commit", "-q", "-m", "first")
        with_secrets(source)
        (source / ".env").write_text("TOKEN=n3w\n")
    run_dir, frozen = freeze(source)
    left = {*SECRETS, "pkg/.env", ".aws/", ".ssh/"}
    assert set(frozen.secrets) == left
    copied = {str(p.relative_to(frozen.dir)) for p in Path(frozen.dir).rglob("*") if p.is_file()}
    assert copied == {"train.py", ".env.example", "pkg/model.py"}
    [warning] = left_out(frozen)
    assert warning.code == "HF179"
    assert ".aws/" in warning.message
    assert load_frozen(run_dir)[0] == frozen
    assert frozen.patch is None or "n3w" not in (run_dir / "code" / frozen.patch).read_text()


def test_a_file_named_like_a_secret_is_frozen_if_it_is_named(source, freeze):
    with_secrets(source)
    _, frozen = freeze(source, *SCRIPT, "code.include=[.env, '*.pem', .ssh/config, 'pkg/*']")
    copied = {str(p.relative_to(frozen.dir)) for p in Path(frozen.dir).rglob("*") if p.is_file()}
    assert {".env", "tls.pem", ".ssh/config"} <= copied
    assert not {"tls.key", ".aws/credentials"} & copied


def test_a_run_frozen_before_there_were_secrets_can_be_read(source, freeze):
    run_dir, frozen = freeze(source)
    raw = json.loads((run_dir / "code.json").read_text())
    del raw["secrets"]
    (run_dir / "code.json").write_text(json.dumps(raw))
    assert load_frozen(run_dir)[0] == frozen


def test_what_only_its_owner_may_read_is_never_open_while_it_is_copied(source, freeze, monkeypatch):
    (source / "train.py").chmod(0o600)
    seen = []

    def copy(content, out):
        seen.append(stat.S_IMODE(os.fstat(out.fileno()).st_mode))
        out.write(content.read())

    monkeypatch.setattr("launcher.runs.submitting.freeze.shutil.copyfileobj", copy)
    freeze(source)
    assert 0o400 in seen
    assert not any(mode & 0o077 for mode in seen if mode == 0o400)


def test_a_pipe_in_place_of_a_file_is_no_trap(source, make_run):
    run_dir, files = make_run(source)
    (source / "train.py").unlink()
    os.mkfifo(source / "train.py")
    with pytest.raises(UserError, match="HF641"):
        freeze_code(run_dir, files)

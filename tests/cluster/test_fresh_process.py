"""What a script can see of its process is what it sees under torchrun, or is in docs/scripts.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scenario

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "dump_process.py"
PAGE = (ROOT / "docs" / "scripts.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
AGENT = [sys.executable, "-m", "launcher.cli.main", "agent"]
DIFFERS = {
    r".* variable (HOLDFAST_\w+|(GLOO|NCCL)_SOCKET_IFNAME|TORCH_FR_BUFFER_SIZE)": "variables",
    r".* variable TORCHINDUCTOR_CACHE_DIR|(imported|fork) temporary folder": "imported",
    r".* variable (PYTORCH_NVML_BASED_CUDA_CHECK|PYTHONPATH)": "variables",
    r".* variable (MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|_)": "variables",
    r"(first|fork) (command line|name)": "name",
    r"(first|imported|fork|spawn) flag (safe_path|unbuffered)": "sys.flags",
    r"spawn (command line|sys.orig_argv)": "sys.flags",
    r"(first|fork|spawn) descriptors": "descriptors",
    r"spawn sys.stdin": "descriptors",
    r"fork sys.stdin": "descriptors",
    r"first (torch is imported|filters|atexit)": "imported",
    r"(first|imported|fork) gc frozen": "gc.freeze",
    r"(first|imported|fork) faulthandler": "faulthandler",
    r"(first|fork) status SigCgt": "faulthandler",
    r"first tasks": "threads",
    r"first prctl parent-death signal": "parent-death signal",
    r"imported torch (hooks|classes)": "torch's hooks",
}
"""What may differ, as `part name`, and the row of the page's table that says so."""
ROWS = dict(
    re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \|$",
        PAGE.partition("## What differs from a fresh process")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
)


def environment(folder: Path) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "TMPDIR": str(folder)}
    ours = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
    # torch._dynamo and accelerate put these there, should a test have imported them.
    put = ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK")
    for name in (*ours, "PYTEST_CURRENT_TEST", *put):
        env.pop(name, None)
    return env


def launch(folder: Path, *command: str, mark: bool = True, modules=()) -> list[dict]:
    """Run the script by `command` and return what each worker has seen, epoch by epoch."""
    folder.mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *([str(folder / "mark")] if mark else [])],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    texts = [path.read_text() for path in sorted(folder.glob("*.json")) if "-" in path.name]
    return [json.loads(text.replace(str(folder), "FOLDER")) for text in texts]


def differences(ours: dict, theirs: dict) -> dict[str, tuple[object, object]]:
    return {
        f"{part} {name}": (seen.get(name, "none"), theirs[part].get(name, "none"))
        for part, seen in ours.items()
        if part not in {"modules", "drawn"}
        for name in seen.keys() | theirs[part].keys()
        if seen.get(name, "none") != theirs[part].get(name, "none")
    }


def undocumented(found: dict[str, object]) -> dict[str, object]:
    return {
        name: values
        for name, values in found.items()
        if not any(re.fullmatch(pattern, name) for pattern in DIFFERS)
    }


def repeated(seen: list[dict]) -> set[str]:
    """Return what two workers, or two epochs, have drawn alike."""
    return {
        name
        for name in seen[0]["drawn"]
        if len({json.dumps(worker["drawn"][name]) for worker in seen}) < len(seen)
    }


def theirs_only(modules: list[str]) -> list[str]:
    ours = ("elastic_trainer", "holdfast", "launcher", "__")
    return [name for name in modules if not name.startswith(ours)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return what is seen under an agent and under torchrun, with the same modules imported."""
    folder = tmp_path_factory.mktemp("seen")
    options = ("--standalone", "--nproc-per-node", "2")
    forked = launch(folder / "forked", *AGENT, *options)
    modules = theirs_only(forked[0]["modules"])
    torchrun = (*TORCHRUN, *options, "--max-restarts", "1")
    return {"forked": forked, "torchrun": launch(folder / "torchrun", *torchrun, modules=modules)}


@pytest.mark.timeout(240)
def test_a_forked_worker_sees_what_a_new_process_sees_in_every_epoch(seen):
    assert len(seen["forked"]) == len(seen["torchrun"]) == 4, "two workers, two epochs"
    for ours, theirs in zip(seen["forked"], seen["torchrun"], strict=True):
        assert undocumented(differences(ours, theirs)) == {}
    assert repeated(seen["forked"]) == repeated(seen["torchrun"]) == set()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_started_by_exec_sees_it_too(seen, tmp_path):
    options = ("--standalone", "--nproc-per-node", "2", "--fresh")
    modules = theirs_only(seen["forked"][0]["modules"])
    fresh = launch(tmp_path / "fresh", *AGENT, *options, modules=modules)
    for ours, theirs in zip(fresh, seen["torchrun"], strict=True):
        assert undocumented(differences(ours, theirs)) == {}
    assert repeated(fresh) == set()


def test_all_that_differs_is_on_the_page_and_does_differ(seen):
    assert set(DIFFERS.values()) <= ROWS.keys()
    assert all(ROWS.values())
    found = [name for ours, theirs in zip(*seen.values(), strict=True)
             for name in differences(ours, theirs)]  # fmt: skip
    stale = {p for p in DIFFERS if not any(re.fullmatch(p, name) for name in found)}
    assert stale == set()
    for name in found:
        variable = name.partition(" variable ")[2]
        if variable and not variable.startswith(("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "_")):
            assert f"`{variable}`" in ROWS["variables"] + ROWS["imported"], variable


CHANGED = {
    "status SigBlk", "Umask", "Cpus_allowed_list", "nice", "RLIMIT_CORE", "RLIMIT_NOFILE",
    "descriptors", "signal SIGUSR1", "signal SIGTERM", "signal SIGINT", "signal realtime 34",
    "signal mask", "sys.excepthook", "sys.unraisablehook", "sys.displayhook", "sys.breakpointhook",
    "threading.excepthook", "filters", "warnings", "logging", "logging last", "gc", "limits",
    "decimal", "locale", "start method", "temporary folder", "variable CHANGED", "sys.path",
    "atexit", "torch.get_default_dtype", "torch.get_float32_matmul_precision",
    "torch.are_deterministic_algorithms_enabled", "torch.is_grad_enabled",
    "numpy", "torch.backends.cudnn.benchmark",
}  # fmt: skip


@pytest.mark.timeout(120)
def test_whatever_is_changed_before_the_fork_is_seen(seen, tmp_path):
    """As the import of such a module would; nothing of it can be missed by the comparison."""
    options = ("--standalone", "--nproc-per-node", "1", "--preload", "changed_process")
    [changed] = launch(tmp_path / "changed", *AGENT, *options, mark=False)
    found = {name.partition(" ")[2] for name in differences(changed, seen["forked"][0])}
    assert found >= CHANGED, CHANGED - found
    assert repeated([changed, *seen["forked"]]) == set(), "whatever seeds there were"
    with_seed_1 = {"torch": 0.7576315999031067, "numpy": 0.417022004702574}
    assert not with_seed_1.items() & changed["drawn"].items()

"""`holdfast doctor`: the root cause among many lines, healthy logs, bad input."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_record import config_of

from elastic_trainer.record.failures import Kind
from elastic_trainer.record.signatures import classes, signatures
from launcher.doctor.doctor import diagnose, run_failures, works_of
from launcher.doctor.judge import Diagnosis, judge
from launcher.doctor.literals import literals_of
from launcher.doctor.runbook import runbook_of
from launcher.doctor.scan import scan
from launcher.platforms.base import JobState, JobStatus
from launcher.platforms.targets import Target
from launcher.spec.errors import UserError

STEPS = "".join(f"step {n} loss 2.{n} lr 1e-4\n" for n in range(20))


def found_in(*logs: str) -> Diagnosis:
    return judge([scan(io.BytesIO(text.encode()), f"{n}.log", n) for n, text in enumerate(logs)])


def test_every_signature_can_be_searched_for_and_is_of_a_kind() -> None:
    for each in signatures():
        assert min(map(len, literals_of(each.pattern.pattern))) >= 2
        assert Kind(each.kind)
        assert each.why
    assert all(each.title and each.fix and each.source for each in classes().values())


@pytest.mark.parametrize("number", range(len(signatures())))
def test_what_a_pattern_matches_has_one_of_its_literals(number: int) -> None:
    pattern = signatures()[number].pattern
    literals = literals_of(pattern.pattern)

    @settings(max_examples=5, database=None)
    @given(st.from_regex(pattern))
    def contained(text: str) -> None:
        assert any(each in text for each in literals)

    contained()


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("abc", {"abc"}),
        (r"a\.b[Cc]d?e", {"a.bCe", "a.bce", "a.bCde", "a.bcde"}),
        ("(?:ab|cd)+x{2}long", {"long"}),
        ("(?:ab|cd)?e", {"e"}),
        ("[a-z]+ab|c.{0,9}def", {"ab", "def"}),
        (r"(?<!no)(?!x)\bword(?=y)", {"word"}),
        ("abc|xabcx", {"abc"}),
        ("(a|b(c|d))ef", {"aef", "bcef", "bdef"}),
    ],
)
def test_literals_are_of_what_must_match(pattern: str, literals: set[str]) -> None:
    assert literals_of(pattern) == literals


@pytest.mark.parametrize("pattern", ["", "a*", "(?:ab)?", "abc|.*", "[a-z]", "(?!ab)", "(a|b?)"])
def test_a_pattern_that_matches_without_a_fixed_string_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        literals_of(pattern)


PEER = "[rank{}]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:35\n"


@pytest.mark.parametrize(
    ("root", "name", "action"),
    [
        ("[rank3]: AssertionError: the batch is empty", "py_error", "fix_user"),
        (
            "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried 2",
            "cuda_oom",
            "fix_user",
        ),
        ("[rank3]: OSError: [Errno 28] No space left on device", "disk_full", "fix_infra"),
        ("[rank3]: ModuleNotFoundError: No module named 'x'", "py_error", "fix_user"),
    ],
)
def test_the_root_is_found_among_thousands_of_consequences(
    root: str, name: str, action: str
) -> None:
    peers = "".join(PEER.format(rank) for rank in range(4, 4004))
    found = found_in(peers, f"Traceback (most recent call last):\n{root}\n")
    assert (found.name, found.action, found.rank) == (name, action, 3)
    assert (found.evidence[0].file, found.evidence[0].line) == ("1.log", 2)
    assert "peer_died" in found.also


def test_the_kernels_word_comes_before_the_programs() -> None:
    kernel = "Nov 24 02:39:30 node7 kernel: NVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU lost\n"
    found = found_in("RuntimeError: CUDA error: an illegal memory access\n", kernel)
    assert (found.name, found.action, found.node) == ("gpu_xid", "restart_elsewhere", "node7")


HEALTHY = [
    "node-a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n",
    "node-a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 8 - Init COMPLETE\n",
    "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0\n",
    "WARNING: Connection reset by peer, retrying in 1 s [Retry 1/5]\n",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [::]:9 (errno: 97).\n",
    "UserWarning: CUDA initialization: the NVIDIA driver is old; this may lead to slow kernels\n",
    "INFO validation error rate: 0.03, errors: 0\n",
    "OSError: [Errno 116] Stale file handle\nopened again\n",
    "requests.exceptions.ReadTimeout: hub; attempt 2/5\n",
    "ConnectionError: wandb did not answer\n",
    "DEBUG no progress bar: not a terminal\n",
]


@pytest.mark.parametrize("noise", HEALTHY)
def test_what_training_went_on_after_is_not_blamed(noise: str) -> None:
    found = found_in(STEPS + noise + STEPS)
    assert (found.name, found.action) == ("healthy", "none")


def test_the_end_of_a_log_counts_though_the_same_was_survived_often_before() -> None:
    often = "OSError: [Errno 5] Input/output error\n" * 100 + STEPS
    assert found_in(often).name == "healthy"
    assert found_in(often + "OSError: [Errno 5] Input/output error\n").name == "storage_io"


def test_ranks_that_read_the_same_data_are_told() -> None:
    def log(same: bool) -> str:
        return "".join(
            f"[rank{rank}] step {step} sample_ids=[{step}, {0 if same else rank}]\n"
            for step in range(3)
            for rank in range(4)
        )

    assert (found_in(log(same=True)).name, found_in(log(same=False)).name) == (
        "same_data",
        "healthy",
    )


def test_what_could_not_be_read_is_told_with_every_diagnosis(tmp_path: Path) -> None:
    steps = ((rank, step) for step in range(3) for rank in range(4))
    lines = (f"[rank{rank}] step {step} sample_ids=[{step}, 0]\n" for rank, step in steps)
    (tmp_path / "run.log").write_text("".join(lines))
    (tmp_path / "core").write_bytes(bytes(range(1, 32)) * 99)
    found = diagnose([str(tmp_path)], tmp_path, io.BytesIO())
    assert found.name == "same_data"
    [unread] = found.unread
    assert unread.startswith(f"{tmp_path / 'core'}: ")


WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank {}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={}, OpType={}, NumelIn=4, Timeout(ms)=600000) ran for 600010 milliseconds\n"
)


def test_a_time_out_in_different_collectives_is_the_programs() -> None:
    lines = "".join(WATCHDOG.format(rank, 7, "ALLREDUCE") for rank in (1, 2, 3))
    found = found_in(lines + WATCHDOG.format(0, 7, "BROADCAST"))
    assert (found.name, found.action, found.rank) == ("nccl_timeout", "fix_user", 0)
    found = found_in(lines)
    assert (found.action, found.rank) == ("restart_in_place", 0)


def test_a_flight_recorders_dump_runs_no_code() -> None:
    entry = {
        "is_p2p": False,
        "process_group": ["0", "default"],
        "collective_seq_id": 3,
        "state": "started",
        "retired": False,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[2, 3]],
    }
    [work] = works_of(json.dumps({"entries": [entry]}).encode(), 5)
    assert (work.rank, work.number, work.operation, work.elements) == (5, 3, "all_reduce", 6)
    with pytest.raises(ValueError, match="flight recorder"):
        works_of(pickle.dumps({"entries": [entry]}), 5)


def test_bad_input_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "binary.log").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty.log").touch()
    found = diagnose([str(tmp_path)], tmp_path, io.BytesIO())
    assert (found.name, len(found.unread)) == ("unknown", 1)
    (tmp_path / "utf16.log").write_text("MemoryError: x\n", encoding="utf-16")
    assert diagnose([str(tmp_path)], tmp_path, io.BytesIO()).name == "host_oom"
    with pytest.raises(UserError, match="HF201"):
        diagnose([str(tmp_path / "missing")], tmp_path, io.BytesIO())


def test_a_run_directory_that_is_half_written_is_read(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs" / "1" / "n2"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "job.json").write_text("{")
    (logs / "5.log").write_text("ValueError: 3 labels for 4 rows")
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.rank, found.node) == ("py_error", 5, "n2")
    error = logs / "5" / "error.json"
    error.parent.mkdir()
    message = {"message": "MemoryError: x", "extraInfo": {"timestamp": "1700000000"}}
    error.write_text(json.dumps({"message": message}))
    assert diagnose([str(error)], tmp_path, io.BytesIO()).name == "host_oom"


def write_run(run_dir: Path, events: Sequence[Mapping[str, Any]], logs: Mapping[str, str]) -> None:
    (run_dir / "events").mkdir(parents=True)
    plain = {"v": 1, "epoch": None, "step": None, "node": None, "rank": None, "t_mono": 0.0}
    lines = [json.dumps({**plain, "t_unix": 1.7e9 + n, **each}) for n, each in enumerate(events)]
    (run_dir / "events" / "job.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for name, text in logs.items():
        path = run_dir / "logs" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def formed(epoch: int, *members: str) -> dict[str, Any]:
    fields = {"members": list(members), "coordinator": members[0], "layout": "dp2"}
    return {"event": "epoch.formed", "node": members[0], "epoch": epoch, **fields}


def step(epoch: int, number: int) -> dict[str, Any]:
    return {"event": "step.completed", "node": "n1", "epoch": epoch, "step": number, "loss": 2.0}


LOST = {"event": "member.lost", "node": "n1", "epoch": 1, "member": "n2"}
PEER_LOGS = {"n1/0.log": PEER.format(0), "n3/2.log": PEER.format(2)}


def test_a_pod_that_was_lost_is_no_failure_of_a_slurm_node(tmp_path: Path) -> None:
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), LOST, formed(2, "n1", "n3"), step(2, 2)]
    write_run(tmp_path / "run", events, PEER_LOGS)
    raw = {"target": "jobset", "job_id": "a", "submit_time": None, "run_id": "run"}
    (tmp_path / "run" / "submitted.json").write_text(json.dumps(raw))
    [told] = run_failures(tmp_path / "run")
    assert (told["class"], told["kind"], told["node"]) == ("k8s_pod_lost", "node_lost", "n2")
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.survived) == ("k8s_pod_lost", True)


def test_what_kubernetes_says_of_pods_is_read_as_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", [], {})
    (tmp_path / "run" / "job.json").write_text(config_of().to_json())
    raw = {"target": "jobset", "job_id": "a", "submit_time": None, "run_id": "run"}
    (tmp_path / "run" / "submitted.json").write_text(json.dumps(raw))
    words = "0 of 1 pods run; pod a: it ran out of memory"
    status = JobStatus(state=JobState.RUNNING, reason="OOMKilled", words=words, broke=1.0)

    class Cluster:
        def status(self, jobs):
            return dict.fromkeys(jobs, status)

        def fetch(self, job):
            pass

    monkeypatch.setattr(Target, "load_backend", lambda _: Cluster())
    assert diagnose(["run"], tmp_path, io.BytesIO()).name == "host_oom"
    reason = "StartError: exec: python3: executable file not found"
    status = JobStatus(state=JobState.PENDING, reason=reason, broke=1.0)
    assert diagnose(["run"], tmp_path, io.BytesIO()).name == "k8s_crashloop"


@pytest.mark.parametrize("code", [None, 0, 91])
def test_a_run_that_survived_a_lost_node_names_it(tmp_path: Path, code: int | None) -> None:
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), LOST, formed(2, "n1", "n3"), step(2, 2)]
    events += [] if code is None else [{"event": "run.ended", "code": code}]
    write_run(tmp_path / "run", events, PEER_LOGS)
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.node, found.survived) == ("node_lost", "n2", True)
    [told] = run_failures(tmp_path / "run")
    assert (told["class"], told["action"], told["node"]) == (found.name, found.action, "n2")
    (tmp_path / "run" / "job.json").write_text("{}")
    name, text = runbook_of(str(tmp_path / "run"), tmp_path, None)
    assert name == "node_lost"
    assert f"holdfast why {tmp_path}/run\n" in text
    assert "nodes exclude" not in text


def test_a_pod_that_a_wrapped_manifest_lost_gets_no_word_of_slurm(tmp_path: Path) -> None:
    """Nobody submitted such a run but kubectl; its pods count their starts in it."""
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), LOST, formed(2, "n1", "n3"), step(2, 2)]
    write_run(tmp_path / "run", events, PEER_LOGS)
    (tmp_path / "run" / "pods").mkdir()
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.node, found.survived) == ("k8s_pod_lost", "n2", True)
    assert run_failures(tmp_path / "run")[0]["class"] == "k8s_pod_lost"


def test_a_wrapped_batch_script_that_lost_a_node_gets_slurms_word(tmp_path: Path) -> None:
    """Nobody submitted such a run but sbatch; its attempts are a job's starts."""
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), LOST, formed(2, "n1", "n3"), step(2, 2)]
    write_run(tmp_path / "run", events, {})
    (tmp_path / "run" / "logs" / "4711.0" / "n1").mkdir(parents=True)
    assert run_failures(tmp_path / "run")[0]["class"] == "slurm_node_fail"
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.runbook) == ("slurm_node_fail", "holdfast runbook slurm_node_fail")


def exited(node: str, rank: int, kind: Kind, detail: str) -> dict[str, Any]:
    fields = {"worker_rank": rank, "kind": kind, "action": "restart", "detail": detail}
    return {"event": "worker.exit", "node": node, "epoch": 1, "code": 1, **fields}


@pytest.mark.parametrize(
    ("detail", "log", "name", "action"),
    [
        (
            "exit code 1",
            "torch.OutOfMemoryError: CUDA out of memory. 2 GiB",
            "cuda_oom",
            "fix_user",
        ),
        ("exit code 1", "no words", "child_failed", "fix_user"),
        ("SIGKILL", "no words", "child_failed", "restart_in_place"),
        ("ValueError: 3 labels", "ValueError: 3 labels", "py_error", "fix_user"),
    ],
)
def test_the_failing_ranks_own_log_says_more_than_a_bare_exit(
    tmp_path: Path, detail: str, log: str, name: str, action: str
) -> None:
    events = [formed(1, "n1", "n2", "n3"), exited("n2", 1, Kind.CRASH, detail)]
    events += [{"event": "run.ended", "code": 94}]
    write_run(tmp_path / "run", events, {**PEER_LOGS, "n2/1.log": f"{log}\n"})
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.action, found.rank, found.node) == (name, action, 1, "n2")
    assert not found.survived
    assert any(each.file.endswith("events") for each in found.evidence)


def test_a_kernel_fault_of_the_machine_explains_the_lost_node(tmp_path: Path) -> None:
    events = [formed(1, "n1", "n2", "n3"), LOST]
    write_run(tmp_path / "run", events, PEER_LOGS)
    kernel = (
        "Nov 14 22:13:19 {} kernel: NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus\n"
    )
    (tmp_path / "kern.log").write_text(kernel.format("n2"))
    (tmp_path / "other.log").write_text(kernel.format("n9"))
    names = ["run", str(tmp_path / "kern.log")]
    assert diagnose(names, tmp_path, io.BytesIO()).name == "gpu_xid"
    names[1] = str(tmp_path / "other.log")
    found = diagnose(names, tmp_path, io.BytesIO())
    assert (found.name, found.node) == ("node_lost", "n2")


def test_a_kernel_fault_counts_while_the_run_goes_on(tmp_path: Path) -> None:
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), LOST, formed(2, "n1", "n3"), step(2, 2)]
    write_run(tmp_path / "run", events, PEER_LOGS)
    kernel = (
        "Nov 14 23:59:19 n3 kernel: NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus\n"
    )
    (tmp_path / "kern.log").write_text(kernel)
    found = diagnose(["run", str(tmp_path / "kern.log")], tmp_path, io.BytesIO())
    assert (found.name, found.node, found.survived) == ("gpu_xid", "n3", False)
    (tmp_path / "kern.log").write_text(kernel.replace("n3", "n2").replace("23:59", "22:13"))
    found = diagnose(["run", str(tmp_path / "kern.log")], tmp_path, io.BytesIO())
    assert (found.name, found.node, found.survived) == ("gpu_xid", "n2", True)


def test_the_first_of_several_failures_leads_whatever_the_others_are(tmp_path: Path) -> None:
    """As in `why`: the first that is no mere consequence of a peer's."""
    peer = exited("n3", 2, Kind.COLLATERAL, "Connection closed by peer")
    first = exited("n2", 1, Kind.CRASH, "exit code 1")
    kernel = exited("n1", 0, Kind.NODE_FAULT, "NVRM: Xid (PCI:0000:0a:00): 79, GPU lost")
    ended = {"event": "run.ended", "code": 94}
    write_run(tmp_path / "run", [formed(1, "n1", "n2", "n3"), peer, first, kernel, ended], {})
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.rank, found.node) == ("child_failed", 1, "n2")
    assert "gpu_xid" in found.also
    assert [told["node"] for told in run_failures(tmp_path / "run")][:1] == ["n2"]


@pytest.mark.parametrize(
    ("line", "name", "action"),
    [
        ("NVRM: Xid (PCI:0000:54:00): 145, RLW_REMAP Nonfatal XC0", "nvlink_fabric",
         "restart_elsewhere"),
        ("Xid (PCI:0000:dc:00): 45, Ch 1 caused by previous Xid 149", "nvlink_fabric",
         "restart_elsewhere"),
        ("health check: XID 79 on GPU 3", "gpu_xid", "restart_elsewhere"),
        ("GPU 3: Xid error: 31", "gpu_xid", "fix_user"),
        ("NVRM: Xid (PCI:0000:54:00): 63, Row Remapper", "gpu_ecc", "none"),
    ],
)  # fmt: skip
def test_an_xid_is_known_in_any_spelling(line: str, name: str, action: str) -> None:
    found = found_in(f"{line}\n")
    assert (found.name, found.action) == (name, action)


def test_a_warning_alone_is_neither_blamed_nor_health() -> None:
    found = found_in("WARNING: Connection reset by peer\n")
    assert (found.name, len(found.evidence)) == ("unknown", 1)
    assert found_in("WARNING: Connection reset by peer\n" + STEPS).name == "healthy"


def test_every_class_of_a_run_is_told(tmp_path: Path) -> None:
    killed = exited("n1", 0, Kind.KILLED, "SIGKILL")
    events = [formed(1, "n1", "n2", "n3"), step(1, 1), killed, formed(2, "n1", "n2", "n3")]
    events += [step(2, 2), {**LOST, "epoch": 2}, formed(3, "n1", "n3"), step(3, 3)]
    write_run(tmp_path / "run", events, {})
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.also) == ("node_lost", ("child_failed",))


def test_wrong_numbers_of_a_run_that_ended_well_are_told(tmp_path: Path) -> None:
    events = [formed(1, "n1"), step(1, 1), {"event": "run.ended", "code": 0}]
    write_run(tmp_path / "run", events, {"n1/0.log": STEPS + "step 21 loss: nan\n"})
    assert diagnose(["run"], tmp_path, io.BytesIO()).name == "nan_loss"
    write_run(tmp_path / "well", events, {"n1/0.log": STEPS + PEER.format(0)})
    assert diagnose(["well"], tmp_path, io.BytesIO()).name == "healthy"


def test_a_slow_worker_of_a_run_is_told(tmp_path: Path) -> None:
    slow = {"event": "worker.slow", "node": "n1", "epoch": 1, "worker_rank": 1, "member": "n2"}
    write_run(tmp_path / "run", [formed(1, "n1", "n2"), step(1, 1), slow, step(1, 2)], {})
    found = diagnose(["run"], tmp_path, io.BytesIO())
    assert (found.name, found.action, found.node) == ("straggler", "none", "n2")


@pytest.mark.parametrize(
    ("line", "first", "then", "name"),
    [
        ("kernel: NVRM: Xid (PCI:0000:0a:00): {}, pid=1", 63, 79, "gpu_xid"),
        ("slurmstepd: error: task ended, exit code {}", 1, 137, "host_oom"),
        ("iteration 7 | number of nan iterations: {:3d} |", 0, 3, "nan_loss"),
        ("OSError: [Errno {}] it failed", 11, 28, "disk_full"),
    ],
)
def test_lines_that_differ_in_a_number_only_are_told_apart(
    line: str, first: int, then: int, name: str
) -> None:
    text = f"{line.format(first)}\n" * 3
    assert found_in(text).name != name
    assert found_in(text + line.format(then)).name == name

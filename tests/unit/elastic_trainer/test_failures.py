from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.record.failures import (
    DETAIL_CHARS,
    Action,
    Failure,
    Kind,
    classify,
    names_an_error,
    one_line,
    signature,
)


def record(message: str) -> dict[str, object]:
    return {"message": {"message": message, "extraInfo": {"timestamp": "1"}}}


COLLATERAL = [
    "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:3567",
    "RuntimeError: [../gloo/pair.cc:589] Read error [10.1.1.4]:21407: Connection reset by peer",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error",
    "DistNetworkError: failed to recv, got 0 bytes",
    "PeerStorageAwayError: rank 3: __3_0.distcp: Stale file handle",
    "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
]
PORT_TAKEN = "DistNetworkError: failed to bind (errno: 98 - Address already in use)"
FALLEN_OFF = "NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus.\n"
USERS = [
    "ModuleNotFoundError: No module named 'megatron'",
    "ImportError: cannot import name 'x' from 'y'",
    "SyntaxError: invalid syntax (train.py, line 3)",
    "ValueError: HF103 layout.tp: 16 does not divide the 8 KV heads",
]
NODES = [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "RuntimeError: CUDA error: unspecified launch failure",
    "OSError: [Errno 107] Transport endpoint is not connected: '/data/corpus'",
    "RuntimeError: cuda runtime error (802) : system not yet initialized at THCGeneral.cpp:50",
]
MEMORY = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.",
    "MemoryError: ",
    "OSError: [Errno 12] Cannot allocate memory",
]

SHARED = [
    "OSError: [Errno 5] Input/output error: '/data/corpus'",
    "OSError: [Errno 101] Network is unreachable",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error",
    "torch.distributed.DistBackendError: NCCL error in: init.cc:1, ncclInternalError",
    "BoardAwayError: the board did not answer for 60 s: OSError: [Errno 116] Stale file handle",
    "BoardAwayError: the board did not answer for 60 s: NotSentError: Connection reset by peer",
    "StorageAwayError: rank 3: __3_0.distcp: Connection timed out (and 1 more ranks)",
    "SaveRefusedError: the state of step 9 could not be saved: OSError: [Errno 116] Stale file",
    "ApiError: HF531 the state of step 9 could not be kept: see checkpoint.failed in the events",
]
SERVICES = [
    "requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='hub', port=443)",
    "HTTPError: 503 Server Error: Service Unavailable for url: https://hub/model",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "TimeoutError: the lock of /data/index was not free within 60 s",
]
DEVICES = [
    "RuntimeError: CUDA error: unknown error",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
]
PROGRAMS = [
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`",
    "AssertionError: the batch is empty",
    "OSError: [Errno 30] Read-only file system: '/app/out'",
    "RuntimeError: shape '[4096, 1, 5, 179]' is invalid for input of size 3670016",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, invalid usage",
    "IndexError: index 512 is out of range",
]


@pytest.mark.parametrize(
    ("message", "kind", "action"),
    [
        *((text, Kind.COLLATERAL, Action.RESTART) for text in COLLATERAL),
        *((text, Kind.USER_ERROR, Action.STOP) for text in USERS),
        *((text, Kind.NODE_FAULT, Action.EVICT) for text in NODES),
        *((text, Kind.OUT_OF_MEMORY, Action.RESTART) for text in MEMORY),
        *((text, Kind.INFRASTRUCTURE, Action.RESTART) for text in SHARED),
        *((text, Kind.SERVICE, Action.RESTART) for text in SERVICES),
        *((text, Kind.FAULT, Action.RESTART) for text in DEVICES),
        *((text, Kind.CRASH, Action.RESTART) for text in PROGRAMS),
        ("ValueError: loss is nan", Kind.CRASH, Action.RESTART),
        (PORT_TAKEN, Kind.CRASH, Action.RESTART),
        (
            "e.training.replicas.SilentCorruptionError: x",
            Kind.CORRUPTION,
            Action.EVICT,
        ),
        ("ReplicaMismatchError: model.x differs", Kind.CORRUPTION, Action.RESTART),
    ],
)
def test_exceptions_mean_the_same_from_a_record_and_from_a_log(
    message: str, kind: Kind, action: Action
) -> None:
    recorded = classify(code=1, signal=None, record=record(message))
    logged = classify(code=1, signal=None, log_tail=f"step 7\nTraceback (most …):\n{message}\n")
    assert (recorded.kind, recorded.action) == (kind, action)
    assert (logged.kind, logged.action) == (kind, action)
    assert message[:20].strip() in recorded.detail


@pytest.mark.parametrize(
    ("number", "tail", "kind"),
    [
        (signal.SIGKILL, "", Kind.KILLED),
        (signal.SIGKILL, "step 3 done\n", Kind.KILLED),
        (signal.SIGKILL, "slurmstepd: error: Detected 1 oom_kill event\n", Kind.OUT_OF_MEMORY),
        (signal.SIGTERM, "", Kind.KILLED),
        (signal.SIGSEGV, "Fatal Python error: Segmentation fault\n", Kind.FAULT),
        (signal.SIGILL, "", Kind.FAULT),
        (signal.SIGSYS, "", Kind.CRASH),
        (signal.SIGALRM, "", Kind.CRASH),
        (signal.SIGINT, "KeyboardInterrupt\n", Kind.CRASH),
        (signal.SIGBUS, "", Kind.OUT_OF_MEMORY),
        (signal.SIGABRT, "", Kind.CRASH),
        (
            signal.SIGABRT,
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n",
            Kind.COLLATERAL,
        ),
        (signal.SIGKILL, FALLEN_OFF, Kind.NODE_FAULT),
    ],
)
def test_signals(number: signal.Signals, tail: str, kind: Kind) -> None:
    failure = classify(code=None, signal=number, log_tail=tail)
    assert failure.kind is kind
    assert failure.action is (Action.EVICT if kind is Kind.NODE_FAULT else Action.RESTART)


FAULTHANDLER = """Fatal Python error: Aborted

Thread 0x00007fef3f8696c0 (most recent call first):
  File "/lib/threading.py", line 982 in run
  ...
Current thread 0x00007fef62a17b80 [python] (most recent call first):
  File "/home/me/train.py", line 5 in <module>
  <timed out: thread is gone>
<no Python frame>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libc.so.6", at abort+0x10 [0x7f]

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


CUDA_ASSERT = """terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: device-side assert triggered
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
Exception raised from f at /pytorch/c10/a.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in a.so)"""


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ("free(): double free detected in tcache 2", None),
        ("malloc(): corrupted top size", None),
        ("corrupted size vs. prev_size", None),
        ("*** stack smashing detected ***: terminated", None),
        ("python: ../src/a.cc:12: void f(): Assertion `x > 0' failed.", None),
        ("terminate called without an active exception", None),
        ("Fatal Python error: none_dealloc: deallocating None", None),
        (CUDA_ASSERT, "c10::Error: CUDA error: device-side assert triggered"),
        ("terminate called after throwing an instance of 'int'", "int"),
        ("F1126 16:00:00.0 7 grid.cc:12] Check failed: cells > 0", None),
    ],
)
def test_the_reason_of_an_abort_is_what_was_said_before_the_stacks(
    said: str, detail: str | None
) -> None:
    tail = f"Traceback (most recent call last):\nValueError: got over\nstep 7\n{said}\n"
    if said.startswith("F1126"):
        tail = f"step 7\n{said}\n"  # of an unknown form: the last line
    failure = classify(code=None, signal=signal.SIGABRT, log_tail=tail + FAULTHANDLER)
    assert failure.kind is Kind.CRASH
    assert failure.detail == f"{detail or said} (SIGABRT)"


def test_a_worker_that_said_nothing_ended_by_its_code_or_signal_alone() -> None:
    header = "--- 2026-01-31T12:00:00Z epoch 1 rank 0 local_rank 0 pid 5 forked ---\n"
    assert classify(code=3, signal=None, log_tail=header).detail == "exit code 3"
    aborted = classify(code=None, signal=signal.SIGABRT, log_tail=header + FAULTHANDLER)
    assert aborted.detail == "SIGABRT"


def test_a_signal_without_a_name_is_a_failure_like_others() -> None:
    failure = classify(code=None, signal=signal.SIGRTMIN + 6)
    assert failure.action is Action.RESTART
    assert f"signal {signal.SIGRTMIN + 6}" in failure.detail


def test_shells_report_signals_as_codes() -> None:
    assert classify(code=137, signal=None) == classify(code=None, signal=9)
    assert classify(code=200, signal=None).detail == "exit code 200"


def test_do_not_restart_is_the_workers_own_word() -> None:
    failure = classify(code=93, signal=None, log_tail="job.yaml: HF201 corpus is empty\n")
    assert failure == Failure(
        kind=Kind.USER_ERROR,
        action=Action.STOP,
        detail="job.yaml: HF201 corpus is empty",
        sure=True,
    )


def test_a_missing_file_is_the_users_only_at_the_start() -> None:
    gone = record("FileNotFoundError: [Errno 2] No such file or directory: '/data/corpus'")
    assert classify(code=1, signal=None, record=gone, at_start=True).action is Action.STOP
    assert classify(code=1, signal=None, record=gone, at_start=False).kind is Kind.CRASH


def test_warnings_in_the_log_do_not_outweigh_the_record() -> None:
    tail = "RuntimeWarning: Connection reset by peer\nuncorrectable ECC error, recovered\n"
    failure = classify(code=1, signal=None, record=record("ValueError: x"), log_tail=tail)
    assert failure.kind is Kind.CRASH


@pytest.mark.parametrize("xid", [13, 31, 43, 63, 94])
def test_xids_of_applications_do_not_cost_the_node_its_place(xid: int) -> None:
    tail = f"NVRM: Xid (PCI:0000:0a:00): {xid}, pid=3, name=python\n"
    assert classify(code=1, signal=None, log_tail=tail).action is Action.RESTART


@given(
    st.one_of(st.tuples(st.integers(1, 255), st.none()), st.tuples(st.none(), st.integers(1, 31))),
    st.one_of(
        st.none(),
        st.dictionaries(st.sampled_from(["message", "x"]), st.text()),
        st.builds(record, st.text()),
        st.just({"message": {"message": 3}}),
    ),
    st.text(),
    st.booleans(),
)
def test_every_end_has_a_meaning_on_one_line(
    ending: tuple[int | None, int | None], error: object, tail: str, at_start: bool
) -> None:
    failure = classify(
        code=ending[0], signal=ending[1], record=error, log_tail=tail, at_start=at_start
    )
    assert failure.detail
    assert len(failure.detail.splitlines()) == 1
    assert len(failure.detail) <= DETAIL_CHARS


def test_one_line_cuts() -> None:
    assert one_line("a\n  b") == "a b"
    assert one_line("x" * 1000) == "x" * (DETAIL_CHARS - 1) + "…"


def test_messages_lose_the_paths_of_somebody_elses_build():
    said = (
        "RuntimeError: [/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:219. This is typically caused by a remote worker crashing. Check the logs"
    )
    assert one_line(said) == "RuntimeError: Connection closed by peer [127.0.0.1]:219"


def test_the_signature_is_that_of_every_rank():
    first = "IndexError: index 513 is out of bounds for dimension 0 with size 512 at 0x7f3a"
    assert signature(first) == signature(first.replace("513", "77").replace("7f3a", "81bb"))
    assert signature("KeyError: 'a'") != signature("KeyError: 'b'")


@pytest.mark.parametrize(
    ("detail", "says"),
    [
        ("ValueError: x (exit code 1)", True),
        ("torch.OutOfMemoryError: CUDA out of memory", True),
        ("ZeroDivisionError", True),
        ("SIGSEGV", False),
        ("exit code 1", False),
        ("step 7 loss 3.1 (exit code 1)", False),
    ],
)
def test_how_a_process_ended_is_no_error_of_its_own(detail: str, says: bool) -> None:
    assert names_an_error(detail) is says


def test_warnings_before_an_exception_decide_nothing():
    tail = (
        "node-a:1:1 [0] NCCL WARN Connect to 10.0.0.1 failed : Connection refused\nValueError: x\n"
    )
    assert classify(code=1, signal=None, log_tail=tail).kind is Kind.CRASH


def test_what_a_script_warned_of_before_its_own_error_costs_no_node():
    """Without an error file its log is all there is, and programs log what they got over."""
    tail = (
        "WARNING cache: OSError: [Errno 116] Stale file handle, opened again\n"
        "Traceback (most recent call last):\n"
        "ValueError: 3 labels for 4 rows\n"
    )
    assert classify(code=1, signal=None, log_tail=tail).kind is Kind.CRASH
    kernel = FALLEN_OFF + "Traceback (most recent call last):\nValueError: x\n"
    assert classify(code=1, signal=None, log_tail=kernel).action is Action.EVICT


def test_the_rank_that_torch_puts_before_a_traceback_hides_no_exception():
    tail = (
        "WARNING cache: OSError: [Errno 116] Stale file handle, opened again\n"
        "[rank3]: Traceback (most recent call last):\n"
        "[rank3]: ValueError: 3 labels for 4 rows\n"
    )
    failure = classify(code=1, signal=None, log_tail=tail)
    assert failure.kind is Kind.CRASH
    assert names_an_error(failure.detail)
    missing = "[rank3]: ModuleNotFoundError: No module named 'wandb'\n"
    assert classify(code=1, signal=None, log_tail=missing).kind is Kind.USER_ERROR


def test_the_lines_after_an_exception_are_its_own():
    tail = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled cuda\n"
        "Last error:\nCuda failure 'uncorrectable ECC error encountered'\n"
    )
    assert classify(code=1, signal=None, log_tail=tail).action is Action.EVICT

"""The doctor blames no healthy log, however noisy; a log in another wrapping is the same log."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.doctor.judge import judge
from launcher.doctor.scan import scan

_, *LOGS = (Path(__file__).parent / "healthy_logs.txt").read_text().split("=== ")
STEPS = "".join(f"step {n} loss 2.{n} lr 1e-4\n" for n in range(20))
LOGS_BY_NAME = dict(each.split("\n", 1) for each in LOGS)


@pytest.mark.parametrize("name", LOGS_BY_NAME)
def test_no_healthy_log_is_blamed(name: str) -> None:
    found = judge([scan(io.BytesIO(LOGS_BY_NAME[name].encode()), name, 0)])
    assert (found.name, found.action) == ("healthy", "none"), found.evidence


FAILED = {
    "cuda_oom": STEPS + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "py_error": STEPS
    + "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'",
    "host_oom": "srun: error: gpu01: task 3: Out Of Memory\nsrun: Terminating StepId=4711.0",
    "disk_full": STEPS + "OSError: [Errno 28] No space left on device: '/ckpt/step_10'",
    "gpu_xid": "Jan  5 10:00:05 gpu01 kernel: NVRM: Xid (PCI:0000:1a:00): 79, pid=7, GPU lost",
    "child_failed": STEPS + "SIGKILL",
    "shape_mismatch": STEPS
    + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "nan_loss": STEPS + "step 20 loss: nan lr 1e-4\nstep 21 loss: nan lr 1e-4",
    "slurm_time_limit": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 1 DUE TO TIME LIMIT ***",
    "k8s_image_pull": "  Warning  Failed  2m  kubelet  Error: ErrImagePull",
    "nccl_net": "n1:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2 with status=12",
    "hf_download": "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach the hub",
    "healthy": LOGS_BY_NAME["megatron_startup"] + STEPS,
}
AT = "2026-01-05T10:00:00.123456789Z"
BAR = "  1%|# | 1/99 [00:01<00:09]\r"
COLLECTED = {
    "coloured": "\x1b[31m{}\x1b[0m",
    "after a bar": BAR + "{}",
    "torch": "[rank3]: {}",
    "torchrun": "[default3]:{}",
    "srun": " 3: {}",
    "mpirun": "[1,3]<stderr>:{}",
    "kubectl --timestamps": AT + " {}",
    "CRI": AT + " stderr F {}",
    "kubectl --prefix": "[pod/trainer-0/main] {}",
    "CRLF": "{}\r",
    "plain": "{}",
}
LOG_KEYS = ("log", "message", "msg")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


@given(
    st.sampled_from(sorted(FAILED)),
    st.lists(st.sampled_from(sorted(COLLECTED)), max_size=2),
    st.one_of(st.none(), st.sampled_from(LOG_KEYS)),
    st.sampled_from(ENCODINGS),
    st.binary(max_size=8),
)
def test_a_log_in_another_wrapping_is_the_same_log(
    name: str, wrappings: list[str], key: str | None, encoding: str, torn: bytes
) -> None:
    lines = FAILED[name].split("\n")
    for wrapping in wrappings:
        lines = [COLLECTED[wrapping].format(line) for line in lines]
    if key is not None:
        lines = [json.dumps({key: f"{line}\n", "stream": "stderr", "time": AT}) for line in lines]
    log = "\n".join(lines).encode(encoding)
    log += b"" if encoding == "utf-16" else b"\n" + torn
    assert judge([scan(io.BytesIO(log), "log", 0)]).name == name


@given(st.binary(max_size=4096))
def test_any_bytes_are_read(content: bytes) -> None:
    assert judge([scan(io.BytesIO(content), "log", 0)]).confidence >= 0.0

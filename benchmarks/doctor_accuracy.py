"""Accuracy and speed of `holdfast doctor` on logs with known classes.

    python benchmarks/doctor_accuracy.py FILE.jsonl [--alternates FILE.json] [--misses]

FILE.jsonl has one log a line: id, class, action, text. --alternates: id -> other classes and
actions that count too ("also_class", "also_action"); alternates.json beside FILE is found by
itself. No figure is fitted to the file: the table is fixed, so each of the five folds (by id) is
scored as unseen, and their worst is printed too. mb_per_s is the least of three logs on one
thread: the samples repeated, a run's steps, noisy warnings; a fourth, whose lines carry random
words of the samples, is printed beside it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.doctor.judge import HEALTHY, Diagnosis, judge
from launcher.doctor.scan import scan

SPEED_MB = 192


def diagnose(text: str) -> Diagnosis:
    """Return the diagnosis of one log."""
    return judge([scan(io.BytesIO(text.encode()), "log", 0)])


_WARNINGS = (
    "{at} [rank{r}]: W {at} torch/distributed/distributed_c10d.py:{n}] barrier(): using device {k}",
    "node{r}:{n}:{n} [{k}] NCCL INFO Channel {k}/0 : {k}[{k}] -> {k}[{k}] via P2P/CUMEM/read",
    "node{r}:{n}:{n} [{k}] NCCL INFO NET/IB : Using [0]mlx5_{k}:1/IB [RO]; OOB eth0:10.0.{k}.7<0>",
    "{at} torch/utils/data/dataloader.py:{n}: UserWarning: This DataLoader will create {k} workers",
    '{at} INFO httpx HTTP Request: GET https://huggingface.co/api/x{n} "HTTP/1.1 200 OK"',
    "{at} WARNING urllib3 Retrying (Retry(total={k})) after 'NewConnectionError': /x{n}",
    "{at} [rank{r}] INFO saved step {n} in {k}.{n} s, {n} files, error count 0, failed 0",
    "{at} INFO step {n} loss {k}.{n} lr 3e-4 grad_norm {k}.{n} mem {n}GiB tok/s {n}",
    "[{at}] [WARNING] [real_accelerator.py:{n}:get_accelerator] unable to detect device {k}",
    "{at} Gradient overflow. Skipping step, loss scaler {k} reducing loss scale to {n}.0",
    "{at} FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated, line {n}",
)
_STEP = (
    " [{at}] iteration {n:8d}/  500000 | consumed samples: {n:12d} | elapsed time per iteration "
    "(ms): {k}{n}.1 | learning rate: {f:.6E} | global batch size:  1024 | lm loss: {f:.6E} | loss "
    "scale: 1.0 | grad norm: {f:.3f} | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)


def _lines(rng: random.Random, formats: Sequence[str], count: int) -> str:
    return "\n".join(
        rng.choice(formats).format(
            at=f"2026-01-0{rng.randint(1, 9)} 03:0{rng.randint(0, 9)}:00",
            r=rng.randint(0, 4095),
            n=rng.randint(0, 999_999),
            k=rng.randint(0, 7),
            f=rng.random() * 9,
        )
        for _ in range(count)
    )


def speed(texts: Sequence[str]) -> dict[str, float]:
    """Return MB/s on one thread: the samples repeated, steps of a run, noisy warnings.

    Last, steps to which random words of the samples are added, so that no two lines are alike.
    """
    rng = random.Random(0)
    words = [word for text in texts for word in text.split() if word.isalpha()]
    steps = _lines(rng, [_STEP], 200_000)
    unlike = "\n".join(f"{line} {' '.join(rng.choices(words, k=6))}" for line in steps.split("\n"))
    logs = {
        "samples": "\n".join(texts),
        "steps": steps,
        "warnings": _lines(rng, _WARNINGS, 200_000),
        "unlike": unlike,
    }
    found = {}
    for name, text in logs.items():
        block = text.encode()
        data = block * max(1, SPEED_MB * 10**6 // len(block))
        start = time.perf_counter()
        judge([scan(io.BytesIO(data), "log", 0)])
        found[name] = round(len(data) / 1e6 / (time.perf_counter() - start), 1)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--alternates", type=Path)
    parser.add_argument("--misses", action="store_true", help="print the logs that were missed")
    asked = parser.parse_args()
    beside = asked.file.parent / "alternates.json"
    path = asked.alternates or (beside if beside.is_file() else None)
    also: dict[str, dict[str, list[str]]] = {} if path is None else json.loads(path.read_text())
    samples: list[dict[str, Any]] = [
        json.loads(line) for line in asked.file.read_text().splitlines() if line.strip()
    ]
    folds: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    alarms = 0
    for sample in samples:
        found = diagnose(sample["text"])
        more = also.get(sample["id"], {})
        right = (
            found.name in (sample["class"], *more.get("also_class", ())),
            str(found.action) in (sample["action"], *more.get("also_action", ())),
        )
        folds[zlib.crc32(sample["id"].encode()) % 5].append(right)
        alarms += sample["class"] == HEALTHY and found.name != HEALTHY
        if asked.misses and not all(right):
            wanted = f"{sample['class']}/{sample['action']}"
            print(f"{sample['id']}: {wanted}, found {found.name}/{found.action}")
    every = [right for fold in folds.values() for right in fold]
    shares = [
        [sum(right[part] for right in fold) / len(fold) for fold in folds.values()]
        for part in (0, 1)
    ]
    print(f"{len(samples)} logs; worst of five folds: class {min(shares[0]):.3f}, "
          f"action {min(shares[1]):.3f}")  # fmt: skip
    figures = speed([sample["text"] for sample in samples])
    print("MB/s: " + ", ".join(f"{name} {figure}" for name, figure in figures.items()))
    print(
        json.dumps(
            {
                "class_accuracy": round(sum(right[0] for right in every) / len(every), 4),
                "action_accuracy": round(sum(right[1] for right in every) / len(every), 4),
                "healthy_false_alarms": alarms,
                "mb_per_s": min(figures[name] for name in ("samples", "steps", "warnings")),
            }
        )
    )


if __name__ == "__main__":
    main()

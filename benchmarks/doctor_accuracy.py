"""Accuracy and speed of `holdfast doctor` on logs with known classes.

    python benchmarks/doctor_accuracy.py FILE.jsonl [--alternates FILE.json] [--misses]

FILE.jsonl has one log a line: id, class, action, text. --alternates: id -> other classes and
actions that count too ("also_class", "also_action"); alternates.json beside FILE is found by
itself. No figure is fitted to the file: the table is fixed, so each of the five folds (by id) is
scored as unseen, and their worst is printed too. mb_per_s is measured on text of varied lines,
and the logs themselves repeated, on one thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from launcher.diagnosis.judge import HEALTHY, Diagnosis, judge
from launcher.diagnosis.scan import scan

SPEED_MB = 192


def diagnose(text: str) -> Diagnosis:
    """Return the diagnosis of one log."""
    return judge([scan(io.BytesIO(text.encode()), "log", 0)])


def speed(texts: list[str]) -> float:
    """Return the slowest MB/s of: varied lines of a healthy run, and the same with failures."""
    rng = random.Random(0)
    words = [word for text in texts for word in text.split() if word.isalpha()]
    figures = []
    for failures in (False, True):
        lines = [
            f"2026-01-{rng.randint(1, 28):02} 0{rng.randint(0, 9)}:00:00,{rng.randint(0, 999):03} "
            f"[rank{rng.randint(0, 4095)}] INFO step {rng.randint(0, 10**6)} "
            f"loss {rng.random() * 9:.4f} lr {rng.random():.3e} {' '.join(rng.choices(words, k=6))}"
            for _ in range(200_000)
        ]
        if failures:
            lines += [line for text in texts for line in text.splitlines()]
        block = "\n".join(lines).encode()
        data = block * max(1, SPEED_MB * 10**6 // len(block))
        start = time.perf_counter()
        judge([scan(io.BytesIO(data), "log", 0)])
        figures.append(len(data) / 1e6 / (time.perf_counter() - start))
    return min(figures)


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
    print(
        json.dumps(
            {
                "class_accuracy": round(sum(right[0] for right in every) / len(every), 4),
                "action_accuracy": round(sum(right[1] for right in every) / len(every), 4),
                "healthy_false_alarms": alarms,
                "mb_per_s": round(speed([sample["text"] for sample in samples]), 1),
            }
        )
    )


if __name__ == "__main__":
    main()

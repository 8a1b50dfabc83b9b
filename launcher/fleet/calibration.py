"""`holdfast calibrate`: one or two nodes measure what a step's time depends on.

Processes of elastic_trainer/train/calibration.py are started as preflight starts its own; what
they are asked, and what they find, are files of JSON in a folder that all nodes share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from elastic_trainer.plan.measured import Asked, Found, rounds
from elastic_trainer.storage.files import read_json, read_regular, write_atomic
from elastic_trainer.storage.typed import build, parse_json
from launcher.fleet.preflight.nodes import Preflight
from launcher.platforms.retries import polled
from launcher.spec.errors import UserError

SERVER: Final = "elastic_trainer.train.calibration"
"""Run on the nodes; the launcher itself does without torch."""
START_S: Final = 300.0
"""Longest wait until the first round has ended: nodes may be in use."""
ROUND_S: Final = 100.0
"""Longest wait for a later round."""
_POLL_S: Final = 0.1
_MAX_BYTES: Final = 1 << 20
_WORDS: Final = {
    "alone": "products, memory, launches and steps of each rank alone",
    "inside": "collectives within a node",
    "across": "collectives between nodes",
    "pair": "steps of two ranks",
}
"""Round -> what it measures, for people who wait."""


def measure(asked: Asked, preflight: Preflight) -> Found:
    """Have the nodes measure, and return what all rounds found.

    Raises:
        UserError: HF215 a node does not answer, or says why it cannot; HF612 the folder cannot be
            made; HF632 submitit is not there.
    """
    place = preflight.folder
    preflight.make_folder()
    write_atomic(place / "asked.json", json.dumps(asdict(asked)))
    numbers = {node: str(number) for number, node in enumerate(asked.nodes)}
    answers: list[Found] = []
    with preflight.serving(asked.nodes, lambda node: [SERVER, str(place), numbers[node]]) as gone:
        for name in rounds(len(asked.nodes), asked.workers):
            preflight.say(_WORDS[name])
            limit_s = ROUND_S if answers else START_S
            answers.append(_round(place, name, asked.nodes, gone, limit_s))
    return replace(
        answers[0],
        transfers=tuple(each for answer in answers for each in answer.transfers),
        steps=tuple(each for answer in answers for each in answer.steps),
    )


def _round(
    place: Path,
    name: str,
    nodes: Sequence[str],
    gone: Callable[[], Mapping[str, str]],
    limit_s: float,
) -> Found:
    """Wait for what a round finds."""

    def look() -> Found | str | None:
        dead = gone()  # before the file: a process may have written it, and ended
        try:
            return build(Found, parse_json(read_regular(place / f"found-{name}.json", _MAX_BYTES)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            return f"{nodes[0]}'s answer cannot be used: {error}"
        for number, node in enumerate(nodes):
            said = read_json(place / f"problem-{number}.json").get("problem") or dead.get(node)
            if said:
                return f"{node}: {said}"
        return None

    found = polled(look, lambda answer: answer is not None, for_s=limit_s, every_s=_POLL_S)
    if isinstance(found, Found):
        return found
    raise UserError("HF215", found or f"{name}: no answer within {limit_s:g} s; are nodes in use?")

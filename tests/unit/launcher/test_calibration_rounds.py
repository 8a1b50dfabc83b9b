"""The launcher's part of a calibration: what it waits for, and what it says where nothing comes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace

import hostile_items as hostile
import pytest
import synthetic_profile as synthetic

from elastic_trainer.plan.measured import Asked, Found
from elastic_trainer.storage.typed import build, parse_json
from launcher.fleet import calibration
from launcher.fleet.calibration import measure
from launcher.spec.errors import UserError

ASKED = Asked(nodes=("a", "b"), workers=2, device="cpu", compiled=False)
FOUND = synthetic.found()


class Emulated:
    """Starts no processes; what they would write is written by `does`, with the folder."""

    def __init__(self, folder):
        self.folder, self.dead, self.started = folder, {}, []
        self.does = lambda folder: None

    def make_folder(self):
        self.folder.mkdir()

    def say(self, text):
        assert text

    @contextlib.contextmanager
    def serving(self, nodes, words):
        self.started = [words(node) for node in nodes]
        self.does(self.folder)
        yield lambda: self.dead


@pytest.fixture
def preflight(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "START_S", 0.2)
    monkeypatch.setattr(calibration, "ROUND_S", 0.2)
    return Emulated(tmp_path / "files")


def answer(folder, **rounds):
    for name, found in rounds.items():
        (folder / f"found-{name}.json").write_text(json.dumps(asdict(found)))


def parts():
    """Return what each round finds of FOUND."""
    alone = replace(FOUND, transfers=(), steps=FOUND.steps[:3])
    inside, across = (
        Found(transfers=tuple(each for each in FOUND.transfers if each.nodes == nodes))
        for nodes in (1, 2)
    )
    return {
        "alone": alone,
        "inside": inside,
        "across": across,
        "pair": Found(steps=FOUND.steps[3:]),
    }


def test_what_the_rounds_find_is_put_together(preflight):
    preflight.does = lambda folder: answer(folder, **parts())
    assert measure(ASKED, preflight) == FOUND
    assert [words[-1] for words in preflight.started] == ["0", "1"]
    asked = parse_json((preflight.folder / "asked.json").read_text())
    assert build(Asked, asked) == ASKED


def failing(preflight):
    with pytest.raises(UserError) as error:
        measure(ASKED, preflight)
    assert error.value.code == "HF215"
    return error.value.message


def test_nodes_that_do_not_answer_are_told(preflight):
    assert "alone: no answer within 0.2 s" in failing(preflight)


def test_what_a_node_says_of_itself_is_told(preflight):
    def does(folder):
        answer(folder, alone=parts()["alone"])
        (folder / "problem-1.json").write_text('{"problem": "inside: no GPU"}')

    preflight.does = does
    assert failing(preflight) == "b: inside: no GPU"


def test_a_process_that_is_gone_is_told(preflight):
    preflight.dead = {"b": "no module torch"}
    assert failing(preflight) == "b: no module torch"


def test_an_answer_counts_though_its_process_has_ended(preflight):
    preflight.dead = {"a": "ended", "b": "ended"}
    preflight.does = lambda folder: answer(folder, **parts())
    assert measure(ASKED, preflight) == FOUND


def test_rubbish_is_no_answer(preflight, tmp_path):
    good = json.loads(json.dumps(asdict(parts()["alone"])))
    for number, (kind, make) in enumerate(hostile.items(good)):
        preflight.folder = tmp_path / f"files-{number}"
        preflight.does = lambda folder, make=make: make(folder / "found-alone.json")
        assert failing(preflight), kind
        hostile.clear(preflight.folder / "found-alone.json")

"""docs/events.md lists exactly the events there are, with the fields they have."""

from __future__ import annotations

import re
from pathlib import Path

from elastic_trainer.record.events import EVENTS
from launcher.record.failures import PHASES

TEXT = (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z]+\.[a-z]+)` \| (.*?) \| (.*?) ?\|$", re.MULTILINE)


def test_every_event_has_its_row_and_no_other():
    rows = {
        name: (text, [field.strip().strip("`") for field in fields.split(",") if field])
        for name, text, fields in ROW.findall(TEXT)
    }
    expected = {}
    for name, meaning in EVENTS.items():
        text, _, fields = meaning.partition(". ")
        expected[name] = (text, [field.strip() for field in fields.split(",") if field])
    assert rows == expected
    assert list(rows) == list(EVENTS)


def test_phases_are_listed_in_order():
    text = TEXT.split("## Phases")[1]
    named = [name for name in re.findall(r"`(\w+)`", text) if name in PHASES]
    assert named[: len(PHASES)] == list(PHASES)

"""For all tests. Hypothesis measures no time: on a busy machine that says nothing of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")

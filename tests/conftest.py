"""For all tests. Hypothesis measures no time: on a busy machine that says nothing of the code."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")

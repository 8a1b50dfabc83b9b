"""What the integration with torchtitan refuses; tests/cluster/test_integrations.py runs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_trainer.integrations.torchtitan import keep
from elastic_trainer.worker.progress import ApiError


@pytest.mark.parametrize(("parts", "pp"), [(1, True), (2, False)])
def test_a_pipeline_is_refused(parts, pp):
    trainer = SimpleNamespace(
        model_parts=[None] * parts, parallel_dims=SimpleNamespace(pp_enabled=pp)
    )
    with pytest.raises(ApiError, match="HF536"):
        keep(trainer)

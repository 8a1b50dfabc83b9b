"""What tests of this folder share."""

from __future__ import annotations

import pytest

from elastic_trainer.state.snapshots import image


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Snapshots fit the disk of the tests, however full it is."""
    monkeypatch.setattr(image, "RESERVE", 0.0)


@pytest.fixture
def hf(tmp_path):
    """A directory as `save_pretrained` writes it, of a small model."""
    from hf_models import SHAPE, random_weights, write_hf

    return write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE))


@pytest.fixture
def hf_run(tmp_path, hf):
    """The run directory that an import of `hf` makes."""
    from elastic_trainer.state.hf_convert import import_hf

    import_hf(hf, tmp_path / "run", run_id="r")
    return tmp_path / "run"

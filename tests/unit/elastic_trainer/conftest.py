"""What tests of this folder share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

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


@pytest.fixture
def one_rank(tmp_path):
    """A default process group of this process alone."""
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread():
    """torch computes on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shared_memory():
    """A directory in memory, as snapshots are in."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)

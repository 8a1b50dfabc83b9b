"""Hugging Face's format from a checkpoint of any layout, and back into any layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import SHAPE, Run, make_config
from safetensors.torch import load_file

from elastic_trainer.model.decoder import build
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state import hf_names
from elastic_trainer.state.hf_convert import export_hf, import_hf
from elastic_trainer.state.storage import CheckpointStorage

MANY_ROWS = 10**9
TIED = dataclasses.replace(SHAPE, tie_embeddings=True)


def trained(path, layout, model=SHAPE, steps=2):
    path.mkdir()
    run = Run(path, make_config(path, layout, model=model, steps=steps))
    run.train(1, layout.world_size)
    return run


def export(run, out, model=SHAPE):
    storage = CheckpointStorage(run.path / "checkpoints")
    export_hf(storage, run.commits()[-1], model, out, max_file_bytes=MANY_ROWS)
    return load_file(out / hf_names.SINGLE_NAME)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(ParallelLayout(dp=3), SHAPE, marks=pytest.mark.slow),
        (ParallelLayout(dp=2, tp=2), TIED),
        (ParallelLayout(pp=2, tp=2), SHAPE),
    ],
    ids=["dp3", "dp2-tp2-tied", "pp2-tp2"],
)
def test_an_export_is_what_the_ranks_wrote_together(tmp_path, layout, model):
    run = trained(tmp_path / "run", layout, model)
    stored = run.tensors()
    exported = export(run, tmp_path / "out", model)
    decoder = build(model)
    names = {hf_names.to_hf(n, decoder.hf_names): n for n, _ in decoder.named_parameters()}
    assert exported.keys() == names.keys()
    for theirs, tensor in exported.items():
        assert torch.equal(tensor, stored[f"model.{names[theirs]}"]), theirs
    import_hf(tmp_path / "out", tmp_path / "back", run_id="r", max_chunk_bytes=1000)
    back = Run(tmp_path / "back", make_config(tmp_path / "back", layout, model=model)).tensors()
    parameters = {name for name in stored if name.startswith("model.")}
    assert back.keys() == {*parameters, "trainer.step", "trainer.rng"}
    assert all(torch.equal(back[name], stored[name]) for name in parameters)
    assert back["trainer.step"].item() == 0


def from_weights(hf, path, layout):
    """Import, train 4 steps, look at the record; return the losses."""
    import_hf(hf, path, run_id="r", max_chunk_bytes=3000)
    run = Run(path, make_config(path, layout, steps=4, checkpoint={"every_steps": 2}))
    run.train(1, layout.world_size)
    assert [event.step for event in run.events("checkpoint.restored")] == [0]
    assert [commit.step for commit in run.commits()] == [0, 2, 4]
    assert "optim.state.norm.weight.exp_avg" in run.tensors()
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (4, 0, 0)
    return run.curve()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return exported weights, and the losses that one process has from there."""
    path = tmp_path_factory.mktemp("reference")
    source = trained(path / "source", ParallelLayout(), steps=6)
    export(source, path / "hf")
    losses = from_weights(path / "hf", path / "run", ParallelLayout())
    assert losses[1] < source.curve()[1] - 0.1
    return path / "hf", losses


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pp=2, tp=2),
        pytest.param(ParallelLayout(dp=2, cp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_imported_weights_train_alike_in_every_layout(tmp_path, reference, layout):
    """No optimizer state is there: the first step makes it, then checkpoints have it."""
    hf, losses = reference
    curve = from_weights(hf, tmp_path / "run", layout)
    assert list(curve) == [1, 2, 3, 4]
    assert curve == pytest.approx(losses, rel=2e-6)

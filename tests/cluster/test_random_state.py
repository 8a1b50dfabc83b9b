"""The generator's state in a checkpoint is a function of the seed, though nothing draws from it."""

from __future__ import annotations

import torch
from harness import Run, make_config

from elastic_trainer.layout import ParallelLayout


def test_a_run_saves_the_generator_as_its_seed_makes_it(tmp_path):
    run = Run(tmp_path, make_config(tmp_path, ParallelLayout(), steps=2, seed=5))
    run.train(1, 1)
    saved = run.tensors()["trainer.rng"]
    assert torch.equal(saved, torch.Generator().manual_seed(5).get_state())

from __future__ import annotations

import pytest
import torch

from elastic_trainer.model.decoder import Decoder, rope_table
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.parallel.pipeline import cut_stages
from elastic_trainer.plan.layout import split_layers, stages_of_rank
from elastic_trainer.plan.models import ModelShape

SHAPE = ModelShape(num_layers=5, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50)


def build():
    model = Decoder(SHAPE)
    initialise(model, 0)
    return model


@pytest.mark.parametrize(("pp", "interleave"), [(2, 1), (3, 1), (5, 1), (2, 2)])
def test_the_stages_one_after_the_other_are_the_model(pp, interleave):
    tokens, rope = (
        torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]),
        rope_table(SHAPE, torch.arange(4), "cpu"),
    )
    whole = build()
    expected = whole(tokens, rope)
    spans = split_layers(SHAPE, pp * interleave)
    stages, names = {}, []
    for rank in range(pp):
        model = build()
        mine = cut_stages(model, [spans[i] for i in stages_of_rank(rank, pp, interleave)])
        names += [name for name, _ in model.named_parameters()]
        held = {id(param) for stage in mine for param in stage.parameters()}
        assert held == {id(param) for param in model.parameters()}  # the same, not copies
        stages.update({stage.span.index: stage for stage in mine})
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    x = tokens
    for index in range(pp * interleave):
        stages[index].rope = rope
        x = stages[index](x)
    assert torch.equal(x, expected)

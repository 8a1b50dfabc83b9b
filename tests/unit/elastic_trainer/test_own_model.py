"""A job's own decoder: what is imported, what is refused, and what an export needs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from hf_models import export_run, random_weights
from safetensors.torch import load_file, save_file
from test_rank_part import config_of

from elastic_trainer.model.decoder import Decoder, ModelError, build, rope_table
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape, Plugin, raw_of, shape_of
from elastic_trainer.state import hf_names
from elastic_trainer.state.errors import InputError
from elastic_trainer.state.hf_convert import import_hf
from elastic_trainer.train.rank_part import rank_part

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
OWN = """
from torch import nn
from elastic_trainer.model.decoder import Block, Decoder

class OwnBlock(Block):
    def __init__(self, shape):
        super().__init__(shape)
        self.scale = shape.options["scale"]

    def forward(self, x, *args):
        x = x + self.scale * self.attention(self.attention_norm(x), *args)
        return x + self.scale * self.ffn(self.ffn_norm(x))

class Own(Decoder):
    block = OwnBlock

class Published(Own):
    hf_config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

class Gated(Block):
    def __init__(self, shape):
        super().__init__(shape)
        self.gate = nn.Linear(shape.dim, 1)

class LeftOut(Decoder):
    block = Gated

class Misspelt(LeftOut):
    tensor_plan = {**Decoder.tensor_plan, "gate": "collums"}

class Unnamed(LeftOut):
    hf_config = {}

class Deaf(Block):
    def __init__(self, shape):
        super().__init__(shape)
        self.attention = nn.Identity()

class WithoutAttention(Decoder):
    block = Deaf

class Larger(Decoder):
    def __init__(self, shape):
        super().__init__(shape)
        self.head = nn.Linear(shape.dim, 2 * shape.vocab_size, bias=False)

class Extra(Decoder):
    def __init__(self, shape):
        super().__init__(shape)
        self.second_head = nn.Linear(shape.dim, shape.vocab_size, bias=False)

class Parameter(Decoder):
    def __init__(self, shape):
        super().__init__(shape)
        self.scale = nn.Parameter(nn.init.ones_(self.norm.weight))

class Forward(Decoder):
    def forward(self, tokens, rope):
        return 2 * super().forward(tokens, rope)

def function(shape): ...
"""
DIMENSIONS = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48,
              "vocab_size": 100}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the job's module, whose name no other test imports."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop(name, None)


def shape(folder, name="Own", **changes):
    (path,) = folder.glob("own_*.py")
    given = {**DIMENSIONS, "options": {"scale": 0.5}, **changes}
    return Plugin(plugin=f"{path.stem}:{name}", **given)


def test_the_example_of_the_page_is_a_decoder(folder):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (module,) = folder.glob("own_*.py")
    module.write_text(example)
    model = build(shape(folder, "MyModel"), str(folder))
    assert model.layers["0"].scale == 0.5


def test_it_is_built_from_the_jobs_folder_with_its_options(folder):
    own = shape(folder)
    with pytest.raises(ModelError, match=r"HF330 .*ModuleNotFoundError"):
        build(own)
    model = build(own, str(folder))
    assert isinstance(model, Decoder)
    assert model.layers["1"].scale == 0.5
    assert sys.path[-2:] == [str(folder), f"{folder}/src"]
    plain = Decoder(ModelShape(**DIMENSIONS))
    scaled = type(model)(own)
    scaled.load_state_dict(plain.state_dict())
    tokens, rope = torch.arange(6)[None], rope_table(own, torch.arange(6), "cpu")
    assert not torch.allclose(scaled(tokens, rope), plain(tokens, rope))


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Missing", "HF330", "AttributeError"),
        ("function", "HF331", "Decoder"),
        ("Extra", "HF331", "second_head"),
        ("Parameter", "HF331", "scale"),
        ("Forward", "HF331", "forward"),
        ("Larger", "HF332", r"model\.params: 25120"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(folder, name, code, message):
    with pytest.raises(ModelError, match=message) as caught:
        build(shape(folder, name), str(folder))
    assert caught.value.code == code


def test_an_option_that_is_missing_is_named(folder):
    with pytest.raises(ModelError, match=r"HF331 .*KeyError: 'scale'"):
        build(shape(folder, options={}), str(folder))


def test_params_say_how_many_there_are(folder):
    counted = build(shape(folder, "Larger", params=25000), str(folder))
    assert sum(param.numel() for param in counted.parameters()) == pytest.approx(25000, rel=0.01)


def part_of(folder, name, layout, **changes):
    config = config_of("own", layout, 16, shape=shape(folder, name, **changes))
    config = dataclasses.replace(config, device="cpu", command_dir=str(folder))
    return rank_part(config, config.ladder.rungs[0], 0)


@pytest.mark.parametrize(
    ("name", "params", "degrees", "message"),
    [
        ("LeftOut", None, {"tp": 2}, "gate.weight, gate.bias"),
        ("Misspelt", None, {"tp": 2}, "collums"),
        ("WithoutAttention", 15776, {"cp": 2}, "no CausalAttention"),
    ],
)
def test_what_an_axis_cannot_cut_is_refused_under_it(folder, name, params, degrees, message):
    assert part_of(folder, name, ParallelLayout(dp=2), params=params).num_params_held
    with pytest.raises(ModelError, match=f"HF331 .*{message}"):
        part_of(folder, name, ParallelLayout(**degrees), params=params)


def test_every_axis_at_once_cuts_it(folder):
    part = part_of(folder, "Own", ParallelLayout(dp=2, tp=2, cp=2, pp=2))
    assert part.stages == ((0,),)
    assert part.shapes["layers.0.attention.wq.weight"][1] == (4, 32)


def test_job_json_and_manifests_carry_it_without_its_class(tmp_path):
    own = Plugin(plugin="no_such:Model", **DIMENSIONS, params=7, options={"a": 1, "b": None})
    assert shape_of(json.loads(json.dumps(raw_of(own)))) == own
    config = config_of("own", ParallelLayout(), 16, shape=own)
    assert TrainConfig.from_json(config.to_json()) == config
    assert own.num_params() == 7
    assert "family" not in raw_of(ModelShape(**DIMENSIONS))  # as before there were families
    assert "rope_scaling" not in raw_of(ModelShape(**DIMENSIONS))  # as before there was YaRN
    yarn = ModelShape(
        **DIMENSIONS, rope_scaling="yarn", rope_scaling_factor=4.0, rope_beta_fast=8.0
    )
    assert shape_of(json.loads(json.dumps(raw_of(yarn)))) == yarn
    with pytest.raises(ValueError, match="newer"):
        shape_of({**raw_of(own), "family": "newer"})


def test_an_export_needs_to_know_what_it_is_called_there(folder, tmp_path):
    llama = ModelShape(**DIMENSIONS)
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(random_weights(llama, torch.float32), hf / hf_names.SINGLE_NAME)
    text = json.dumps(hf_names.hf_config(llama, "float32"))
    (hf / hf_names.CONFIG_NAME).write_text(text)
    import_hf(hf, tmp_path / "run", run_id="r")
    options = {"code": str(folder)}
    for name, message in (("Own", "hf_config"), ("Unnamed", "gate")):
        with pytest.raises(InputError, match=f"HF328 .*{message}"):
            export_run(tmp_path / "run", shape(folder, name), tmp_path / "out", **options)
    export_run(tmp_path / "run", shape(folder, "Published"), tmp_path / "out", **options)
    exported = load_file(tmp_path / "out" / hf_names.SINGLE_NAME)
    assert exported.keys() == random_weights(llama).keys()
    config = json.loads((tmp_path / "out" / hf_names.CONFIG_NAME).read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", 32)

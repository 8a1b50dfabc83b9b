"""Job files drawn at random: legal by design, or with a value or two changed."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import strategies as st

MAX_WORLD = 64


@dataclass(frozen=True)
class Drawn:
    """A job file, and whether it was left as designed."""

    text: str
    is_legal: bool
    """By design; a changed one may be legal too."""


def _multiple(draw, unit, *factors):
    return unit * draw(st.sampled_from(factors))


@st.composite
def legal_jobs(draw, max_world=MAX_WORLD):
    """Nested mapping of a job file that breaks no rule."""
    degrees = [1, 1, 2, 2, 3, 4]
    tp = draw(st.sampled_from(degrees))
    cp = draw(st.sampled_from([degree for degree in degrees if tp * degree <= max_world]))
    pp = draw(st.sampled_from([degree for degree in degrees if tp * cp * degree <= max_world]))
    interleave = draw(st.sampled_from([1, 1, 2, 3]))
    replica = tp * cp * pp
    dp = draw(st.integers(1, max(1, min(3, max_world // replica))))
    world = dp * replica
    per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    order = draw(st.one_of(st.none(), st.permutations(["tp", "cp", "pp", "dp"])))
    kv_heads = _multiple(draw, tp, 1, 1, 2)
    heads = _multiple(draw, kv_heads, 1, 2, 3)
    head_dim = draw(st.sampled_from([None, 2, 6, 8]))
    micro_batch = draw(st.sampled_from([1, 1, 2, 3]))
    rounds = _multiple(draw, pp, 1, 1, 2)
    if interleave == 1 and pp > 1:  # what interleaving could not run
        rounds += draw(st.integers(0, 1))
    micro_batches = dp * rounds - (draw(st.integers(0, dp - 1)) if rounds > 1 else 0)
    return {
        "name": "drawn",
        "model": {
            "num_layers": pp * interleave + draw(st.integers(0, 2)),
            "dim": heads * draw(st.sampled_from([4, 8])) + (0 if head_dim is None else 1),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_dim": _multiple(draw, tp, 1, 3, 10, 16),
            "vocab_size": tp * draw(st.integers(-(-256 // tp), 260)),
            "tie_embeddings": draw(st.booleans()),
        },
        "layout": {
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "dp": draw(st.sampled_from(["auto", dp])),
            "dp_replicate": draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0])),
            "schedule": "interleaved" if interleave > 1 else "1f1b",
            "interleave": interleave,
            "allow_tp_across_nodes": True,
            **({"order": list(order)} if order else {}),
        },
        "cluster": {"nodes": world // per_node, "gpus_per_node": per_node, "gpu": "cpu"},
        "train": {
            "seq_len": _multiple(draw, tp * cp * (1 if cp == 1 or tp % 2 == 0 else 2), 1, 2, 3, 4),
            "global_batch": micro_batch * micro_batches,
            "micro_batch": micro_batch,
            "steps": 5,
            "precision": draw(st.sampled_from(["fp32", "bf16"])),
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        },
        "data": {"path": "text"},
        "elastic": {"min_nodes": draw(st.integers(1, world // per_node))},
    }


_OTHER_VALUES = {
    "layout.dp": st.sampled_from([0, "auto", "all", 2.0]),
    "layout.schedule": st.sampled_from(["1f1b", "interleaved", "zbv", "gpipe"]),
    "layout.allow_tp_across_nodes": st.just(False),
    "layout.order": st.sampled_from([["tp"], ["tp", "tp", "pp", "dp"], ["dp", "pp", "cp", "tp"]]),
    "model.tie_embeddings": st.booleans(),
    "model.head_dim": st.sampled_from([None, 3, 5]),
    "train.precision": st.sampled_from(["bf16", "fp32", "fp16"]),
}
_NUMBERS = (
    *(f"layout.{key}" for key in ("tp", "cp", "pp", "dp", "dp_replicate", "interleave")),
    *(f"cluster.{key}" for key in ("nodes", "gpus_per_node")),
    *(f"train.{key}" for key in ("seq_len", "global_batch", "micro_batch")),
    *(f"model.{key}" for key in ("num_layers", "dim", "num_heads", "num_kv_heads")),
    *(f"model.{key}" for key in ("ffn_dim", "vocab_size")),
    "elastic.min_nodes",
)


@st.composite
def drawn_jobs(draw, fewest_changes=0):
    """Some as designed, some with one to three values changed."""
    raw = draw(legal_jobs())
    changed = draw(st.lists(st.sampled_from(_CHANGES), min_size=fewest_changes, max_size=3))
    for key in changed:
        section, name = key.split(".")
        old = raw[section].get(name)
        if key in _OTHER_VALUES and (key not in _NUMBERS or draw(st.booleans())):
            raw[section][name] = draw(_OTHER_VALUES[key])
        else:
            near = [0, 1, 2, 3, 8] if not isinstance(old, int) else [old - 1, old + 1, 2 * old]
            raw[section][name] = draw(st.sampled_from(near))
    return Drawn(json.dumps(raw, indent=1), not changed)


_CHANGES = tuple(sorted({*_OTHER_VALUES, *_NUMBERS}))

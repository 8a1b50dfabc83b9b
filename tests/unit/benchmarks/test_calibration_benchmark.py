"""The benchmark of profiles: what it trains can run, and its predictions are those of the job."""

from __future__ import annotations

import pytest

from launcher.plan.loading import load_spec
from launcher.spec.profile import parse_profile

PROFILE = """{
 "v": 1, "gpu": "cpu", "gpus_per_node": 1, "nodes": 2, "compiled": false, "measured_at": 1800000000,
 "found": {
  "device": "AMD EPYC", "torch": "2.13.0", "launch_s": 3e-6,
  "products": [
   {"precision": "fp32", "rows": 512, "inner": 64, "outer": 64, "seconds": 5e-05},
   {"precision": "fp32", "rows": 512, "inner": 256, "outer": 256, "seconds": 8e-04}
  ],
  "attention": [{"precision": "fp32", "tokens": 128, "width": 256, "seconds": 0.001}],
  "copies": [{"to": "device", "bytes": 1048576, "seconds": 1e-04}],
  "transfers": [
   {"kind": "all_gather", "nodes": 2, "ranks": 2, "bytes": 4096, "seconds": 2e-04},
   {"kind": "all_gather", "nodes": 2, "ranks": 2, "bytes": 1048576, "seconds": 1e-03}
  ],
  "steps": [
STEPS
  ]
 }
}"""
STEP = (
    '   {"layout": "LAYOUT", "precision": "fp32", "dim": 32, "num_layers": DEPTH, "seq_len": 16,\n'
    '    "micro_batch": 1, "micro_batches": 4, "compute_s": SECONDS, "update_s": 0.001}'
)
SECONDS = {
    "dp1-pp1-cp1-tp1": (0.010, 0.025),
    "dp2-pp1-cp1-tp1": (0.030, 0.070),
    "dp1-pp1-cp1-tp2": (0.060, 0.150),
    "dp1-pp2-cp1-tp1": (0.020, 0.040),
}


@pytest.fixture
def benchmark(load, tmp_path, monkeypatch):
    """Return the benchmark, which finds a profile."""
    module = load("calibration")
    steps = [
        STEP.replace("LAYOUT", layout).replace("DEPTH", str(depth)).replace("SECONDS", str(seconds))
        for layout, both in SECONDS.items()
        for depth, seconds in zip((2, 6), both, strict=True)
    ]
    text = PROFILE.replace("STEPS", ",\n".join(steps))
    parse_profile(text, "here")
    monkeypatch.setenv("HOLDFAST_SITES", str(tmp_path / "sites.yaml"))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / f"{module.NAME}.json").write_text(text)
    return module


def test_every_layout_is_a_job_that_is_predicted(benchmark):
    found = {}
    for layout in benchmark.LAYOUTS:
        spec = load_spec(benchmark.JOB, benchmark.sets_of(layout, 40))
        assert spec.full_layout.world_size == spec.cluster.nodes
        assert spec.full_layout.label == layout
        found[layout] = benchmark.predicted(spec)
    assert found["dp1"].dp == found["dp1"].tp == found["dp1"].p2p == 0
    assert min(found["dp2"].dp, found["tp2"].tp, found["pp2"].p2p) > 0
    assert found["tp2"].launch > found["dp1"].launch > found["pp2"].launch > 0

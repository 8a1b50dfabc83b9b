"""The converter as a process: its command line, exit codes, interrupts and memory."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import (
    SHAPE,
    equal_bits,
    newest,
    partials,
    random_weights,
    read_hf,
    write_hf,
)

from elastic_trainer.plan.models import ModelShape, raw_of
from elastic_trainer.state import convert
from elastic_trainer.state.hf_convert import import_hf

ROOT = Path(__file__).parents[3]


def command(*args):
    return [sys.executable, "-m", "elastic_trainer.state.convert", *map(str, args)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def export_args(run, out, *, shape=SHAPE, **more):
    request = {
        "checkpoints": str(run / "checkpoints"),
        "commit": dataclasses.asdict(newest(run)),
        "model": raw_of(shape),
        "out": str(out),
    }
    return "export", json.dumps({**request, **more})


def import_args(hf, run):
    return "import", json.dumps({"hf": str(hf), "run": str(run)})


def main(capsys, *args):
    code = convert.main(list(map(str, args)))
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_import_and_export_by_command(tmp_path, hf, capsys):
    code, lines, err = main(capsys, *import_args(hf, tmp_path / "run"))
    assert (code, err) == (0, "")
    result = lines[-1]["result"]
    assert result["num_params"] == SHAPE.num_params()
    assert result["model"] == raw_of(SHAPE)
    assert result["commit"] == dataclasses.asdict(newest(tmp_path / "run"))
    args = export_args(tmp_path / "run", tmp_path / "out", dtype="bfloat16", context=4096)
    code, lines, err = main(capsys, *args)
    assert (code, err) == (0, "")
    *progress, end = lines
    assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"]
    made = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert end == {
        "result": {
            "files": sorted(made),
            "bytes": sum(made.values()),
            "num_params": SHAPE.num_params(),
        }
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert equal_bits(read_hf(tmp_path / "out"), random_weights(SHAPE))


@pytest.mark.usefixtures("_signals")
def test_exit_codes_tell_wrong_input_from_damage(tmp_path, hf_run, hf, capsys):
    code, _, err = main(capsys, *import_args(hf, hf_run))
    assert (code, err[:5]) == (2, "HF321")
    shutil.rmtree(hf_run / "checkpoints" / newest(hf_run).dir)
    code, _, err = main(capsys, *export_args(hf_run, tmp_path / "out"))
    assert (code, err[:5]) == (1, "HF320")


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("instead", [KeyboardInterrupt, RuntimeError, None])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_inside_torch_save_counts(
    tmp_path, hf, capsys, monkeypatch, *, number, code, instead
):
    """Libraries may pass it on, put an error of their own in its place, or lose it."""
    save = torch.save

    def interrupted(*args):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            if instead is not None:
                raise instead from error
        save(*args)

    monkeypatch.setattr(torch, "save", interrupted)
    ended, lines, err = main(capsys, *import_args(hf, tmp_path / "run"))
    assert (ended, err) == (code, "")
    assert not any("result" in line for line in lines)
    assert not (tmp_path / "run").exists()
    assert not partials(tmp_path)


BIG = ModelShape(
    num_layers=12, dim=512, num_heads=8, num_kv_heads=8, ffn_dim=1024, vocab_size=256
)  # 122 MB of fp32, 10 MB a layer
CAP_BYTES = 12_000_000
MEASURE = """
import json, sys, threading
from pathlib import Path
import psutil
sys.path.insert(0, {helpers!r})
from hf_models import SHAPE, export_run, random_weights, write_hf
from elastic_trainer.state.hf_convert import import_hf
from elastic_trainer.plan.models import ModelShape, raw_of
top, shape = Path({top!r}), {shape!r}
me, peak = psutil.Process(), 0
def look(*_):
    global peak
    peak = max(peak, me.memory_info().rss)
def both(top, shape, cap):
    import_hf(top / "hf", top / "run", run_id="r", on_progress=look, max_chunk_bytes=cap)
    export_run(top / "run", shape, top / "out", on_progress=look, max_file_bytes=cap)
write_hf(top / "small" / "hf", SHAPE, random_weights(SHAPE))
both(top / "small", SHAPE, 10000)  # imports and caches
before, peak = me.memory_info().rss, 0
both(top, shape, {cap})
print(peak - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_one_file(tmp_path):
    write_hf(tmp_path / "hf", BIG, random_weights(BIG, torch.float32), num_files=2)
    code = MEASURE.format(
        helpers=str(Path(__file__).parent), top=str(tmp_path), shape=BIG, cap=CAP_BYTES
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(), capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total_bytes = 4 * BIG.num_params()
    assert total_bytes > 9 * CAP_BYTES
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 9
    # A file, the tensor being read and its stored bytes; and what malloc keeps of them.
    assert int(done.stdout) < 4 * CAP_BYTES < total_bytes / 2


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A folder with `hf`, a model large enough to be interrupted in it, and `run`, its import."""
    folder = tmp_path_factory.mktemp("big")
    hf = write_hf(folder / "hf", BIG, random_weights(BIG, torch.bfloat16))
    import_hf(hf, folder / "run", run_id="r")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
@pytest.mark.parametrize("what", ["import", "export"])
def test_a_stopped_conversion_leaves_nothing_that_counts(tmp_path, big, what, number, code):
    """The signal comes while data is written: after the first line of progress."""
    target = tmp_path / "target"
    if what == "import":
        args = import_args(big / "hf", target)
    else:
        args = export_args(big / "run", target, shape=BIG)
    process = subprocess.Popen(
        command(*args), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        first = json.loads(process.stdout.readline())
        process.send_signal(number)
        _, err = process.communicate(timeout=50)
    assert first["done_bytes"] < first["total_bytes"]
    assert process.returncode == code
    assert err == ""
    assert not target.exists()
    assert len(partials(tmp_path)) == (1 if number == signal.SIGKILL else 0)

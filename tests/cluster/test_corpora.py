"""Real workers on real corpora: Megatron's pairs, and a corpus that changes under the run."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from harness import TEXT, Run, make_config

from elastic_trainer.plan.config import MixedCorpus
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART

TOKENS = np.frombuffer(TEXT.encode(), dtype=np.uint8).astype("<u2")
DOCUMENTS = np.split(TOKENS, range(37, len(TOKENS), 101))


def write_pair(prefix, order):
    """Write a Megatron dataset whose documents lie in the .bin in `order`."""
    sizes = [len(document) for document in DOCUMENTS]
    pointers, at = [0] * len(sizes), 0
    with prefix.with_suffix(".bin").open("wb") as out:
        for document in order:
            pointers[document] = at
            at += out.write(DOCUMENTS[document].tobytes())
    with prefix.with_suffix(".idx").open("wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
        np.array(sizes, dtype="<i4").tofile(out)
        np.array(pointers, dtype="<i8").tofile(out)
        np.arange(len(sizes) + 1, dtype="<i8").tofile(out)
    return {"path": str(prefix), "format": "megatron"}


def job(path, data, *, steps=3):
    path.mkdir(exist_ok=True)
    return make_config(path, ParallelLayout(), steps=steps, data=data)


def trained(path, data):
    run = Run(path, job(path, data))
    run.train(1, 1)
    return run


def test_megatron_pairs_train_as_the_same_tokens_in_one_file_do(tmp_path):
    TOKENS.tofile(tmp_path / "plain.bin")
    plain = trained(tmp_path / "a", {"path": str(tmp_path / "plain.bin"), "format": "nanogpt"})
    # The order of the documents in the file says nothing: the index has it.
    backwards = write_pair(tmp_path / "back", reversed(range(len(DOCUMENTS))))
    curve = plain.curve()
    assert sorted(curve) == [1, 2, 3]
    assert trained(tmp_path / "b", backwards).curve() == curve


def test_a_run_goes_on_only_with_the_corpus_it_began_with(tmp_path):
    data = write_pair(tmp_path / "corpus", range(len(DOCUMENTS)))
    run = trained(tmp_path / "run", data)
    content = (tmp_path / "corpus.bin").read_bytes()
    (tmp_path / "corpus.bin").write_bytes(content[:-2] + b"\1\0")
    run.write(job(run.path, data, steps=6))
    run.train(2, 1, code=EXIT_DO_NOT_RESTART)
    message = json.loads(run.error_file(2, 0).read_text())["message"]["message"]
    assert message.startswith("DataError: HF706 data.path: ")
    assert "bin sha256" in message
    assert [commit.step for commit in run.commits()] == [3]
    (tmp_path / "corpus.bin").write_bytes(content)
    run.train(3, 1)
    assert sorted(run.curve()) == [1, 2, 3, 4, 5, 6]
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (6, 0, 0)


def mixed(folder, **weights):
    """Corpora of these weights, each of other tokens."""
    parts = {"whole": TOKENS, "small": TOKENS[:200], "least": TOKENS[400:700]}
    for name in weights:
        parts[name].tofile(folder / f"{name}.bin")
    mix = {
        name: MixedCorpus(weight=weight, path=str(folder / f"{name}.bin"))
        for name, weight in weights.items()
    }
    return {"path": None, "mix": mix, "format": "nanogpt"}


def test_a_mix_is_the_same_in_every_layout_and_after_a_kill(tmp_path):
    """Which corpus gives which sample, and what the ledger says of it."""
    data = mixed(tmp_path, whole=0.5, small=0.3, least=0.2)
    layouts = [ParallelLayout(dp=dp) for dp in (1, 2, 3)]
    config = {"steps": 6, "data": data, "checkpoint": {"memory_every_steps": 1}}
    curves = {}
    for dp in (1, 2, 3):
        (tmp_path / f"dp{dp}").mkdir()
        run = Run(
            tmp_path / f"dp{dp}", make_config(tmp_path / f"dp{dp}", layouts[dp - 1], **config)
        )
        run.train(1, dp)
        account = run.audit()
        assert (account.steps, account.lost, account.repeated) == (6, 0, 0)
        assert account.sources == {"whole": 36, "small": 22, "least": 14}
        curves[dp] = run.curve()
        drawn = {e.fields["source"]: e.fields for e in run.events("data.source")}
        assert {name: fields["samples"] for name, fields in drawn.items()} == account.sources
        assert drawn["small"]["samples"] > drawn["small"]["windows"]
    (tmp_path / "killed").mkdir()
    run = Run(tmp_path / "killed", make_config(tmp_path / "killed", *layouts, **config))
    with run.epoch(1, 3) as group:
        group.until("step 3", lambda: group.beat(0).step >= 3)
        for worker in group.workers:
            worker.kill()
        group.wait()
    run.train(2, 2)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (6, 0, 0)
    assert account.sources == {"whole": 36, "small": 22, "least": 14}
    for curve in (curves[2], curves[3], run.curve()):
        assert curve == pytest.approx(curves[1], rel=1e-5)
    run.write(
        make_config(
            run.path,
            *layouts,
            **{**config, "steps": 7, "data": mixed(tmp_path, whole=0.5, small=0.25, least=0.25)},
        )
    )
    run.train(3, 1, code=EXIT_DO_NOT_RESTART)
    message = json.loads(run.error_file(3, 0).read_text())["message"]["message"]
    assert message.startswith("DataError: HF706 ")
    assert "small: share" in message

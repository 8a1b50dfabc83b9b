"""Real workers on real corpora: Megatron's pairs, and a corpus that changes under the run."""

from __future__ import annotations

import json
import struct

import numpy as np
from harness import TEXT, Run, make_config

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

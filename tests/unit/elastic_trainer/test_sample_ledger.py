from __future__ import annotations

import json

from elastic_trainer.record.sample_ledger import audit
from elastic_trainer.train.feed import SampleLedger


def writer(run, *, epoch=3, dp_rank=1, resume_step=4):
    return SampleLedger(run, epoch=epoch, dp_rank=dp_rank, resume_step=resume_step, layout="dp2")


def test_a_file_says_where_it_begins_and_what_each_step_was_fed(tmp_path):
    ledger = writer(tmp_path)
    for samples in (range(40, 42), range(42, 44), range(46, 48)):
        ledger.fed(samples)
    ledger.end_step(5)
    ledger.end_step(6)  # nothing but padding
    ledger.fed(range(60, 62))
    ledger.close()
    [path] = (tmp_path / "ledger").iterdir()
    assert path.name == "e000003-dp00001.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"epoch": 3, "resume_step": 4, "layout": "dp2"},
        {"step": 5, "samples": [[40, 44], [46, 48]]},
        {"step": 6, "samples": []},
    ]  # a step that did not end is not there


def test_a_step_is_on_the_file_as_soon_as_it_has_ended(tmp_path):
    """A worker is killed, never closed."""
    ledger = writer(tmp_path)
    ledger.fed(range(2))
    ledger.end_step(5)
    [path] = (tmp_path / "ledger").iterdir()
    assert len(path.read_text().splitlines()) == 2
    ledger.close()


def test_the_audit_reads_what_is_written(tmp_path):
    for rank, samples in enumerate((range(2), range(2, 4))):
        ledger = writer(tmp_path, epoch=1, dp_rank=rank, resume_step=0)
        ledger.fed(samples)
        ledger.end_step(1)
        ledger.close()
    files = [path.read_text().splitlines() for path in (tmp_path / "ledger").iterdir()]
    account = audit(files, global_batch=4)
    assert (account.steps, account.lost, account.repeated) == (1, 0, 0)

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


def test_of_a_mix_each_line_says_which_samples_each_corpus_gave(tmp_path):
    def taken(samples):
        half = {at: (samples.start + at) // 2 for at in (0, 1)}
        ends = {at: (samples.stop + at) // 2 for at in (0, 1)}
        return {"odd": range(half[0], ends[0]), "even": range(half[1], ends[1])}

    for rank, samples in enumerate(([range(4, 5), range(6, 7)], [range(5, 6), range(7, 8)])):
        ledger = SampleLedger(
            tmp_path, epoch=1, dp_rank=rank, resume_step=1, layout="dp2", taken=taken
        )
        for each in samples:
            ledger.fed(each)
        ledger.end_step(2)
        ledger.close()
    files = [path.read_text().splitlines() for path in sorted((tmp_path / "ledger").iterdir())]
    assert [json.loads(lines[1])["sources"] for lines in files] == [
        {"odd": [], "even": [[2, 3], [3, 4]]},
        {"odd": [[2, 3], [3, 4]], "even": []},
    ]
    account = audit(files, global_batch=4, start_step=1)
    assert (account.lost, account.repeated, account.sources) == (0, 0, {"odd": 2, "even": 2})
    # What is done again counts once.
    again = [json.dumps({"epoch": 2, "resume_step": 1})]
    again += [json.dumps({"step": 2, "samples": [[4, 8]], "sources": {"odd": [[2, 4]]}})]
    assert audit([*files, again], global_batch=4, start_step=1).sources == {"odd": 2}
    torn = [files[0][0], json.dumps({"step": 2, "samples": [[4, 8]], "sources": {"odd": 7}})]
    assert audit([torn], global_batch=4, start_step=1).steps == 0

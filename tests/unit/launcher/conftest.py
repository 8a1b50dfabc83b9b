from __future__ import annotations

import pytest

from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

JOB = """\
name: a-job
model: llama3-8b
layout: {tp: 8, dp: auto}
cluster: {nodes: 4, gpus_per_node: 8, gpu: H100-80GB-SXM}
train:
  seq_len: 8192
  global_batch: 64
  steps: 100
data:
  path: corpus
"""


@pytest.fixture
def job_text():
    """A legal job: Llama 3 8B on 32 GPUs."""
    return JOB


@pytest.fixture
def make_spec():
    """Return a spec of the legal job with some values set."""
    return lambda *sets, text=JOB: parse_spec(text, "job.yaml", sets)


@pytest.fixture
def mistakes():
    """Return the lines that a job with some values set is refused with."""

    def lines(*sets, text=JOB):
        with pytest.raises(UserError) as caught:
            parse_spec(text, "job.yaml", sets)
        return [str(problem) for problem in caught.value.problems]

    return lines

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elastic_trainer.train.engine import ENVIRONMENT


def in_a_process(code, **env):
    """In one of its own: the settings hold for the whole process."""
    clean = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    subprocess.run([sys.executable, "-c", code], env={**clean, **env}, check=True)


SETTING = "import os, torch, elastic_trainer.train.engine as d; d.make_deterministic();"


@pytest.mark.slow
def test_it_sets_what_torch_cublas_and_nccl_read_and_makes_no_cuda_context():
    """Nor does importing the trainer: the zygote forks afterwards, which no context survives."""
    in_a_process(
        SETTING + "assert torch.are_deterministic_algorithms_enabled();"
        "assert not torch.is_deterministic_algorithms_warn_only_enabled();"
        "assert not torch.utils.deterministic.fill_uninitialized_memory;"
        "assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8';"
        "assert os.environ['NCCL_NVLS_ENABLE'] == '0';"
        "import torch._inductor.config as c; assert c.deterministic;"
        "import elastic_trainer.train.main; assert not torch.cuda.is_initialized()"
    )


@pytest.mark.process
def test_what_the_user_set_stays():
    in_a_process(SETTING + "assert os.environ['NCCL_NVLS_ENABLE'] == '1'", NCCL_NVLS_ENABLE="1")

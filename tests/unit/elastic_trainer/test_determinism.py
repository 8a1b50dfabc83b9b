from __future__ import annotations

import os
import subprocess
import sys


def test_it_sets_what_torch_and_cublas_read():
    """In a process of its own: the setting holds for the whole process."""
    code = (
        "import os, torch\n"
        "from elastic_trainer.determinism import make_deterministic\n"
        "make_deterministic()\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert not torch.utils.deterministic.fill_uninitialized_memory\n"
        "assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_importing_the_trainer_makes_no_cuda_context():
    """The zygote forks after this import; a context would not survive the fork."""
    code = "import elastic_trainer.train, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)

"""What rendering makes: file name -> text. Nothing is contacted, nothing is written."""

from __future__ import annotations

from typing import Final

Bundle = dict[str, str]
"""File name, relative to the run directory -> its text."""
JOB_FILE: Final = "job.yaml"
"""The job file with its overrides: what may be submitted again."""
MANIFESTS: Final = "manifests.yaml"
"""What is sent to Kubernetes."""

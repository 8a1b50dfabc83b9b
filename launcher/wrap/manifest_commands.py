"""The command of a container that starts a training, as far as its text says. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Final

from launcher.spec.errors import UserError
from launcher.spec.source import Path
from launcher.wrap.launches import BY_TORCHRUN, find_torchrun, torchrun_arguments
from launcher.wrap.manifest_text import ManifestText
from launcher.wrap.sruns import cannot_wrap
from launcher.wrap.tasks import runs_python
from launcher.wrap.wrapped import refuse_secrets

LAUNCHERS: Final = re.compile(
    rf"\b(torchrun|torch\.distributed\.(run|launch)|{'|'.join(sorted(BY_TORCHRUN - {'tune'}))})\b"
    r"|\btune\s+run\b"
)
_SCRIPT: Final = re.compile(r"\.sh\b|(?:^|[\s;&|/])(?:ba|da|z)?sh\s+[^-\s]")
"""Runs a file of the image, which may start a training."""
_BY_PATH: Final = re.compile(
    r"(?<!\S)(/[\w./-]+/)(?:torchrun|python[\d.]*\s(?:-\S+\s+)*-m\s*torch\.|accelerate|deepspeed)"
    r"|(?:source|\.)\s+(/[\w./-]+/)activate\b"
)
"""The folder of the environment that a command names."""
_TPU: Final = "google.com/tpu"


def words_of(job: ManifestText, container: Path) -> list[tuple[Path, str]]:
    """Return the words of a container's command, and where they are written."""
    found = []
    for field in ("command", "args"):
        words = job.get(*container, field) or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            job.refuse(f"{field}: expected a list of texts", container)
        found += [((*container, field, index), word) for index, word in enumerate(words)]
    return found


def check_command(
    job: ManifestText, container: Path, num_pods: int = 1, *, ranks: bool = False
) -> None:
    """Refuse a command that starts no training, or one that would be refused in the pods.

    `num_pods` are those of the job. `ranks`: the operator gives each pod a rank, so that its one
    process may be a worker.

    Raises:
        UserError: HF169, HF163.
    """
    words = words_of(job, container)
    if _TPU in job.mapping(*container, "resources", "limits"):
        job.refuse(f"it asks for {_TPU}: agents run torchrun's scripts on GPUs", container)
    if not words:
        job.refuse("write its command out: what its image runs is not known", container)
    texts = [word for _, word in words]
    text = " ".join(texts)
    if "holdfast batch -- " in text:
        job.refuse("it is wrapped already", container)
    if not (LAUNCHERS.search(text) or _SCRIPT.search(text) or (ranks and runs_python(texts))):
        job.refuse(
            "its command starts no training by torchrun, accelerate or deepspeed; as "
            f"`torchrun {_script_of(texts)}` it would",
            container,
        )
    try:
        refuse_secrets([shlex.join(texts), *texts])
        found = find_torchrun(texts)
        if found is not None and found[0] == 0:
            given = torchrun_arguments(texts, found[1], alone=True)
            if num_pods > 1 and (given.standalone or given.nnodes == "1"):
                cannot_wrap(
                    f"each of {num_pods} pods has a training of its own: create the job as it is"
                )
    except UserError as error:
        where = job.place(words[0][0])
        raise UserError(error.code, error.message, where=where) from error


def wrap_command(job: ManifestText, container: Path) -> None:
    """Have holdfast run the command of a container."""
    words = words_of(job, container)
    text = " ".join(word for _, word in words)
    folder = next((m[1] or m[2] for m in _BY_PATH.finditer(text)), "")
    job.insert(words[0][0], [f"{folder}holdfast", "batch", "--"])


def _script_of(words: list[str]) -> str:
    """Return the Python script of a command, for a message."""
    return next((word for word in " ".join(words).split() if word.endswith(".py")), "SCRIPT")

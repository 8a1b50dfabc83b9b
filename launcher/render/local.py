"""(spec, plan) -> job.json and job.yaml: what every target needs. Pure."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath
from typing import Final

from elastic_trainer.board.address import KUBERNETES
from elastic_trainer.plan.config import CheckpointSection, TrainConfig
from launcher.plan.planning import Plan
from launcher.render.kubernetes_yaml import to_yaml
from launcher.spec.errors import UserError
from launcher.spec.source import read_source, write_sets
from launcher.spec.spec import JobSpec

Bundle = dict[str, str]
"""File name, relative to the run directory -> its text."""
JOB_FILE: Final = "job.yaml"
"""The job file with its overrides: what may be submitted again."""
MANIFESTS: Final = "manifests.yaml"
"""What is sent to Kubernetes."""
HEAD: Final = "# Relative paths are relative to "
"""How the job file that is kept with a run begins."""


def to_train_config(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    fleet: str | None = None,
) -> TrainConfig:
    """Return the contents of job.json.

    Args:
        spec: the checked job.
        plan: its plan, whose ladder the nodes look up.
        run_id: name of the run, unique among the runs of its folder.
        run_dir: where job.json will be, absolute, on shared storage.
        base_dir: folder that relative paths of the spec are relative to, the job file's.
        fleet: where the fleet's ledger is; None: where the job file says.
    """
    checkpoint = dict(spec.checkpoint) | {
        "dir": checkpoint_dir(spec, run_dir=run_dir, base_dir=base_dir),
        "memory_every_steps": plan.snapshots.every_steps,
    }
    tokenizer = spec.data.tokenizer
    return TrainConfig(
        name=spec.name,
        run_id=run_id,
        model_name=spec.model_name,
        model=spec.shape,
        ladder=plan.ladder,
        gpus_per_node=spec.cluster.gpus_per_node,
        device=spec.device,
        train=dataclasses.replace(spec.train, lora=None),  # the model's shape has it
        data=dataclasses.replace(
            spec.data,
            path=spec.data.path and resolve(spec.data.path, base_dir),
            mix=spec.data.mix
            and {
                name: dataclasses.replace(one, path=resolve(one.path or name, base_dir))
                for name, one in spec.data.mix.items()
            },
            tokenizer=tokenizer if tokenizer == "bytes" else resolve(tokenizer, base_dir),
        ),
        validation=spec.validation
        and dataclasses.replace(spec.validation, path=resolve(spec.validation.path, base_dir)),
        checkpoint=CheckpointSection(**checkpoint),
        # Which sizes are left out is the ladder's to say.
        elastic=dataclasses.replace(spec.elastic, min_nodes=plan.ladder.min_nodes, sizes=None),
        network=spec.network,
        numbers=spec.numbers,
        base=spec.base,
        schedule=spec.layout.schedule,
        interleave=spec.layout.interleave,
        command=spec.command,
        track=spec.track or None,
        fleet=fleet or named_ledger(spec, base_dir),
        command_dir=resolve(spec.code.dir, base_dir) if spec.runs_own_code else None,
    )


def named_ledger(spec: JobSpec, base_dir: str | Path) -> str | None:
    """Return where the job file says that the fleet's ledger is; None: it does not."""
    named = spec.cluster.fleet
    return named if named is None or named.startswith(KUBERNETES) else resolve(named, base_dir)


def checkpoint_dir(spec: JobSpec, *, run_dir: str | Path, base_dir: str | Path) -> str:
    """Return the absolute folder of checkpoints; RUN/checkpoints unless the spec names one."""
    if spec.checkpoint.dir is None:
        return str(Path(run_dir) / "checkpoints")
    return resolve(spec.checkpoint.dir, base_dir)


def resolve(path: str, base_dir: str | Path) -> str:
    """Return `path` as an absolute path; a relative one starts at `base_dir`.

    Raises:
        UserError: HF201 it begins with the home (`~name`) of a user who is not known here.
    """
    try:
        return str(Path(base_dir) / Path(path).expanduser())
    except RuntimeError as error:
        home = PurePath(path).parts[0]
        message = f"{path}: nobody here has the home {home}; write the path out, or as ./{path}"
        raise UserError("HF201", message) from error


def render_local(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "",
    fleet: str | None = None,
) -> Bundle:
    """Return job.json and job.yaml, which are kept with the run; arguments as `to_train_config`.

    `python` is for platforms whose nodes run a script; it is not used.
    """
    del python
    config = to_train_config(
        spec, plan, run_id=run_id, run_dir=run_dir, base_dir=base_dir, fleet=fleet
    )
    return {"job.json": config.to_json(), JOB_FILE: job_file(spec, base_dir)}


def job_file(spec: JobSpec, base_dir: str | Path) -> str:
    """Return the job file with the overrides applied, comments and order kept."""
    head = f"{HEAD}{base_dir}\n"
    own = spec.text.removeprefix(head)
    if not spec.sets:
        return head + own
    keys = "".join(f"# set on the command line: {each.partition('=')[0]}\n" for each in spec.sets)
    written = write_sets(own, spec.sets)
    if written is None:
        written = to_yaml([read_source(own, "", spec.sets).data])
    return head + keys + written

"""The rules that span several keys of a job file -> Problems. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import PUBLISHED_CONTEXT, ModelShape
from elastic_trainer.quantities import counted
from launcher.errors import Problem
from launcher.hardware import CPU, GPUS
from launcher.jobspec.env import SECRET_NAME
from launcher.jobspec.kubernetes_rules import kubernetes_findings
from launcher.jobspec.rules import (
    Finding,
    auto_finding,
    choices,
    crosses_nodes,
    divisors,
    layout_findings,
    replicate_finding,
    world_finding,
)
from launcher.jobspec.spec import JobSpec

BYTES_VOCABULARY = 256
SEGMENT_SINCE = "24.05"
"""sbatch --segment: topology/block of that version (man sbatch)."""


def cross_check(spec: JobSpec, bad: set[str]) -> list[Problem]:
    """Return every broken rule and every warning of `spec`.

    `bad` are keys whose value was wrong and has been replaced to get this far:
    what depends on them is left out, since it would blame values nobody wrote.
    """
    findings: list[Finding] = [
        *_layout(spec, bad),
        *_sections(spec),
        *_numbers(spec),
        *_env(spec),
        *_slurm(spec),
        *kubernetes_findings(spec),
    ]
    if not _touches(bad, {"model"}):
        findings += _model(spec)
    return [
        Problem(finding.code, spec.source.where_key(finding.key), finding.message)
        for finding in findings
        if not _touches(bad, finding.needs)
    ]


def _touches(bad: set[str], needs: set[str] | frozenset[str]) -> bool:
    """Return whether a bad key is one of `needs`, around one, or inside one."""
    return any(
        b == n or n.startswith(f"{b}.") or b.startswith((f"{n}.", f"{n}["))
        for b in bad
        for n in needs
    )


def _layout(spec: JobSpec, bad: set[str]) -> Iterator[Finding]:
    facts, want = spec.facts, spec.layout
    replica = want.tp * want.cp * want.pp
    if want.dp == "auto":
        finding = auto_finding(facts, want.tp, want.cp, want.pp)
        dp = facts.num_gpus // replica
        if finding:
            yield finding
            bad = bad | {"layout.dp"}  # what follows from dp would only repeat it
            dp = max(1, dp)
    else:
        dp = want.dp
    layout = ParallelLayout(dp=dp, tp=want.tp, pp=want.pp, cp=want.cp, order=want.order)
    candidates = [replicate_finding(dp, want.dp_replicate), *layout_findings(facts, layout)]
    if want.dp != "auto":
        candidates.append(world_finding(facts, layout))
    for finding in candidates:
        if finding and not _touches(bad, finding.needs):
            yield finding
    if want.allow_tp_across_nodes and crosses_nodes(facts, layout):
        message = f"groups of {want.tp} reach beyond {facts.domain} GPUs, as allowed: slow"
        yield Finding("HF150", "layout.tp", message, frozenset({"layout", "cluster"}))
    batches = facts.num_micro_batches
    if batches > dp and batches % dp:
        idle = -batches % dp
        message = (
            f"dp {dp} does not divide the {batches} micro-batches: {idle} of "
            f"{batches + idle} places of a step idle"
        )
        yield Finding("HF152", "train.global_batch", message, frozenset({"layout", "train"}))


def _sections(spec: JobSpec) -> Iterator[Finding]:
    def finding(code: str, key: str, message: str, *needs: str) -> Finding:
        return Finding(code, key, message, frozenset({key, *needs}))

    layout, cluster, elastic = spec.layout, spec.cluster, spec.elastic
    if layout.schedule == "interleaved" and layout.interleave < 2:
        message = "interleaved needs interleave: 2 or more; for one stage per rank use 1f1b"
        yield finding("HF118", "layout.schedule", message, "layout.interleave")
    if layout.schedule == "1f1b" and layout.interleave > 1:
        message = (
            f"{layout.interleave} stages per rank need schedule: interleaved; set it, or use "
            "interleave: 1"
        )
        yield finding("HF118", "layout.interleave", message, "layout.schedule")
    # Of a script nothing is predicted, so any other GPU is as good.
    of_script = spec.command is not None and cluster.gpu.lower() != CPU
    if not of_script and cluster.gpu not in (*GPUS, CPU):
        gpu = cluster.gpu.upper()
        near = [name for name in GPUS if name.upper().startswith(gpu)]
        import difflib

        near = near or difflib.get_close_matches(gpu, GPUS, n=3, cutoff=0.5)
        message = f"{cluster.gpu} is unknown; use {choices([*(near or GPUS), CPU])}"
        yield finding("HF122", "cluster.gpu", message)
    if elastic.min_nodes is not None and elastic.min_nodes > cluster.nodes:
        message = (
            f"{elastic.min_nodes} is more than the {counted(cluster.nodes, 'node')} of the "
            f"cluster; use {cluster.nodes} or less"
        )
        yield finding("HF120", "elastic.min_nodes", message, "cluster.nodes")
    if elastic.dead_after_s <= elastic.heartbeat_s:
        message = (
            f"{elastic.dead_after_s:g} s of silence would be a death, but a heartbeat comes every "
            f"{elastic.heartbeat_s:g} s; use {5 * elastic.heartbeat_s:g} or so"
        )
        yield finding("HF123", "elastic.dead_after_s", message, "elastic.heartbeat_s")
    if spec.env.venv and spec.env.image:
        yield finding("HF016", "env.image", "venv and image exclude each other; keep one")
    if spec.network.cidr and spec.network.interface != "auto":
        message = "interface and cidr exclude each other; keep one"
        yield finding("HF016", "network.cidr", message, "network.interface")
    warmup, steps = spec.train.optimizer.warmup_steps, spec.train.steps
    if warmup > steps:
        message = f"{warmup} is longer than the run of {steps} steps: lr is never reached"
        yield finding("HF153", "train.optimizer.warmup_steps", message, "train.steps")


def _numbers(spec: JobSpec) -> Iterator[Finding]:
    key, replicas = "numbers.replica_check_steps", spec.layout.dp_replicate
    if spec.numbers.replica_check_steps is None or replicas >= 3:
        return
    way_out = "layout.dp_replicate: 3 or more lets a majority name the node that computes wrong"
    if replicas == 2:
        message = f"of two replicas that differ nobody can say which is wrong; {way_out}"
    else:
        held = "only norms, over tp, have" if spec.layout.tp > 1 else "nothing has"
        message = f"FSDP shards every parameter, so {held} replicas to compare; {way_out}"
    yield Finding("HF157", key, message, frozenset({key, "layout"}))


def _env(spec: JobSpec) -> Iterator[Finding]:
    for name in spec.env.variables:
        key = f"env.variables.{name}"
        if SECRET_NAME.search(name):
            message = (
                "is named like a secret, and job files and scripts are kept and shown; use "
                f"env.secrets.{name}: {{file: PATH}} or {{env: {name}}}"
            )
            yield Finding("HF163", key, message, frozenset({key}))
        elif name in spec.env.secrets:
            message = f"{name} is in env.secrets too; keep one"
            yield Finding("HF016", key, message, frozenset({key, "env.secrets"}))


def _slurm(spec: JobSpec) -> Iterator[Finding]:
    """What contradicts itself in `slurm:`, whatever the job is run on."""
    slurm = spec.slurm

    def finding(code: str, key: str, message: str, *needs: str) -> Finding:
        keys = {f"slurm.{name}" for name in (key, *needs)}
        return Finding(code, f"slurm.{key}", message, frozenset(keys))

    if slurm.gres is not None and slurm.gpu_type is not None:
        yield finding("HF016", "gres", "gres and gpu_type exclude each other; keep one", "gpu_type")
    if slurm.switches is not None and slurm.segment is not None:
        message = "switches are for topology/tree, segment for topology/block; keep one"
        yield finding("HF016", "segment", message, "switches")
    if slurm.array is not None and slurm.restart == "chain":
        message = "tasks of an array have one name, a successor would wait for all; use requeue"
        yield finding("HF016", "restart", message, "array")
    if slurm.fabric_devices is not None and slurm.fabric not in ("infiniband", "roce"):
        message = f"fabric: {slurm.fabric} has no such devices; use infiniband or roce"
        yield finding("HF016", "fabric_devices", message, "fabric")
    if slurm.segment is not None and (slurm.version or "0") < SEGMENT_SINCE:
        stated = f"says {slurm.version}" if slurm.version else "is not given"
        message = (
            f"sbatch has --segment since {SEGMENT_SINCE}, and slurm.version {stated}: state the "
            "cluster's (sbatch --version), or leave segment out"
        )
        yield finding("HF161", "segment", message, "version")
    if slurm.container is not None and spec.env.image is None:
        message = f"{slurm.container} runs an image, and env.image has none; name one"
        keys = frozenset({"slurm.container", "env.image"})
        yield Finding("HF164", "slurm.container", message, keys)
    for index, mount in enumerate(slurm.container_mounts):
        if "," in mount or not mount.startswith("/") or mount.count(":") > 2:
            message = f"expected /path, /path:/there or /path:/there:ro, found {mount}"
            yield finding("HF015", f"container_mounts.{index}", message, "container_mounts")


def _model(spec: JobSpec) -> Iterator[Finding]:
    def finding(code: str, key: str, message: str, *needs: str) -> Finding:
        return Finding(code, key, message, frozenset({key, *needs}))

    shape = spec.shape
    for field, message in dimension_mistakes(shape):
        yield finding("HF023", f"model.{field}", message)
    if (
        spec.data.format == "text"
        and spec.data.tokenizer == "bytes"
        and shape.vocab_size < BYTES_VOCABULARY
    ):
        message = f"{shape.vocab_size} is too small for bytes; use {BYTES_VOCABULARY} or more"
        yield finding("HF024", "model.vocab_size", message, "data")
    context = PUBLISHED_CONTEXT.get(spec.model_name)
    if context and spec.train.seq_len > context:
        message = (
            f"{spec.train.seq_len} tokens exceed the {context} that {spec.model_name} was "
            "published for; give the model by its dimensions with rope_scaling_factor"
        )
        yield finding("HF154", "train.seq_len", message)


def dimension_mistakes(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for dimensions that contradict each other."""
    if shape.num_heads % shape.num_kv_heads:
        usable = choices(divisors(shape.num_heads)[:6])
        heads = f"the {shape.num_heads} heads"
        yield "num_kv_heads", f"{shape.num_kv_heads} does not divide {heads}; use {usable}"
    if not shape.head_dim and shape.dim % shape.num_heads:
        usable = f"{choices(divisors(shape.dim)[:6])}, or give head_dim"
        yield "num_heads", f"{shape.num_heads} does not divide dim {shape.dim}; use {usable}"
    elif shape.head_size % 2:
        yield (
            "head_dim",
            f"heads of {shape.head_size} are odd; rotary embeddings turn pairs: use an even size",
        )

"""The rules that span several keys of a job file -> Problems. Pure."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.plan.config import RECORD_FORMATS, DataSection
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import (
    FAMILIES,
    FULL,
    PUBLISHED_CONTEXT,
    SLIDING,
    LayeredShape,
    MixtureShape,
    ModelShape,
    Plugin,
    Transformers,
)
from elastic_trainer.plan.quantities import counted
from launcher.spec.errors import Offer, Problem
from launcher.spec.hardware import CPU, GPUS
from launcher.spec.pod_patch import RESERVED, own_fields
from launcher.spec.requests import request_findings
from launcher.spec.rules import (
    BrokenRule,
    auto_finding,
    crosses_nodes,
    divisors,
    expert_findings,
    finding,
    instead,
    layout_findings,
    memory_finding,
    own_class_findings,
    replicate_finding,
    world_finding,
)
from launcher.spec.sections import ModelDimensions
from launcher.spec.spec import JobSpec

if TYPE_CHECKING:
    from launcher.spec.kubernetes import Kubernetes
    from launcher.spec.slurm import Slurm

BYTES_VOCABULARY = 256
SEGMENT_SINCE = "24.05"
"""sbatch --segment: topology/block of that version (man sbatch)."""
_EXCLUSIVE: Final = (
    ("gres", "gpu_type", "gres and gpu_type exclude each other"),
    ("mem_per_cpu", "mem", "mem is of a node, mem_per_cpu of a CPU"),
    ("segment", "switches", "switches are for topology/tree, segment for topology/block"),
)
"""Keys of `slurm:` of which a job has one at most."""
_TAKEN: Final = ("/dev/shm", "/etc/holdfast", "/etc/holdfast-secret")  # noqa: S108  of the pods, not of this machine


def cross_check(spec: JobSpec, bad: set[str]) -> list[Problem]:
    """Return every broken rule and every warning of `spec`; their offers are yet to be tried.

    `bad` are keys whose value was wrong and has been replaced to get this far:
    what depends on them is left out, since it would name values nobody wrote.
    """
    found: list[BrokenRule] = [
        *_layout(spec, bad),
        *_sections(spec),
        *_numbers(spec),
        *_env(spec),
        *request_findings(spec),
    ]
    if spec.slurm_section is not None:
        found += _slurm(spec)
    if spec.kubernetes_section is not None:
        found += _kubernetes(spec)
    if not _touches(bad, {"model"}):
        found += _model(spec)
    return [_problem(spec, each) for each in found if not _touches(bad, each.needs)]


def _problem(spec: JobSpec, found: BrokenRule) -> Problem:
    """Return the problem; where nothing can be offered, its message has the code's own fix."""
    where = spec.source.where_key(found.key)
    problem = Problem(found.code, where, found.message, found.offers or ())
    return problem.offering(()) if found.offers == () else problem


def _touches(bad: set[str], needs: set[str] | frozenset[str]) -> bool:
    """Return whether a bad key is one of `needs`, around one, or inside one."""
    return any(
        b == n or n.startswith(f"{b}.") or b.startswith((f"{n}.", f"{n}["))
        for b in bad
        for n in needs
    )


def _layout(spec: JobSpec, bad: set[str]) -> Iterator[BrokenRule]:
    facts, want = spec.facts, spec.layout
    if spec.layout_is_auto:
        return  # it will be one that is legal
    dp = max(1, spec.dp)
    layout = ParallelLayout(dp=dp, tp=want.tp, pp=want.pp, cp=want.cp, order=want.order)
    if want.dp == "auto":
        world = auto_finding(facts, want.tp, want.cp, want.pp)
    else:
        world = world_finding(facts, layout)
    of_dp = [each for each in (world, replicate_finding(dp, want.dp_replicate)) if each]
    of_dp += expert_findings(facts.shape, dp, want.dp_replicate, want.ep)
    # Single degrees, then dp, then the batch: what follows from a wrong one would only repeat it.
    for each in sorted(
        [*layout_findings(facts, layout), *of_dp],
        key=lambda each: (each.key.startswith("train."), each in of_dp),
    ):
        if not _touches(bad, each.needs):
            yield each
            follows = {"layout.dp"} if each.key in ("layout.tp", "layout.cp", "layout.pp") else ()
            bad = bad | {each.key, *follows}
    if _touches(bad, {"layout"}):
        return
    # What stands in for a wrong value may leave no layout to ask about.
    if not _touches(bad, {"model", "cluster", "train", "data.format"}):
        misfit = memory_finding(facts, spec.full_layout)
        if misfit is not None:
            yield misfit
            return
    if want.allow_tp_across_nodes and crosses_nodes(facts, layout):
        message = f"groups of {want.tp} reach beyond {facts.domain} GPUs, as allowed: slow"
        yield finding("HF150", "layout.tp", message, "layout", "cluster")
    batches = facts.num_micro_batches
    if batches > dp and batches % dp and not _touches(bad, {"train"}):
        idle = -batches % dp
        message = (
            f"dp {dp} does not divide the {batches} micro-batches: {idle} of "
            f"{batches + idle} places of a step idle"
        )
        whole = (times * dp * facts.micro_batch for times in (batches // dp, batches // dp + 1))
        yield finding("HF152", "train.global_batch", message, "layout", "train", use=whole)


def _sections(spec: JobSpec) -> Iterator[BrokenRule]:
    layout, cluster, elastic = spec.layout, spec.cluster, spec.elastic
    if layout.schedule == "interleaved" and layout.interleave < 2:
        message, key = "interleaved is for two or more stages per rank", "layout.interleave"
        yield finding("HF118", "layout.schedule", message, key, use=["1f1b"], offers=[{key: 2}])
    if layout.schedule == "1f1b" and layout.interleave > 1:
        message = f"{layout.interleave} stages per rank are for the interleaved schedule"
        offers: list[Offer] = [{"layout.schedule": "interleaved"}]
        yield finding(
            "HF118", "layout.interleave", message, "layout.schedule", use=[1], offers=offers
        )
    # Of a script nothing is predicted, so any other GPU is as good.
    of_script = spec.command is not None and cluster.gpu.lower() != CPU
    if not of_script and cluster.gpu not in (*GPUS, CPU):
        gpu = cluster.gpu.upper()
        near = [name for name in GPUS if name.upper().startswith(gpu)]
        near = near or difflib.get_close_matches(gpu, GPUS, n=3, cutoff=0.5)
        usable = [*(near or GPUS), CPU]
        yield finding("HF122", "cluster.gpu", f"{cluster.gpu} is unknown", use=usable)
    if elastic.min_nodes is not None and elastic.min_nodes > cluster.nodes:
        have = f"the {counted(cluster.nodes, 'node')} of the cluster"
        message, most = f"{elastic.min_nodes} is more than {have}", [cluster.nodes]
        yield finding("HF120", "elastic.min_nodes", message, "cluster.nodes", use=most)
    yield from _sizes(spec)
    if elastic.dead_after_s <= elastic.heartbeat_s:
        message = (
            f"{elastic.dead_after_s:g} s of silence would be a death, but a heartbeat comes every "
            f"{elastic.heartbeat_s:g} s"
        )
        ample = [5 * elastic.heartbeat_s]
        yield finding("HF123", "elastic.dead_after_s", message, "elastic.heartbeat_s", use=ample)
    if spec.env.venv and spec.env.image:
        yield finding("HF016", "env.image", "venv and image exclude each other; keep one")
    if spec.network.cidr and spec.network.interface != "auto":
        message = "interface and cidr exclude each other; keep one"
        yield finding("HF016", "network.cidr", message, "network.interface")
    yield from _validation(spec)
    if spec.train.lora is not None and spec.command is not None:
        message = "what a command trains is its own business; leave the section out"
        yield finding("HF016", "train.lora", message, "command", use=[None])
    yield from _float8(spec)
    yield from _data(spec.data)
    warmup, steps = spec.train.optimizer.warmup_steps, spec.train.steps
    if warmup > steps:
        message = f"{warmup} is longer than the run of {steps} steps: lr is never reached"
        tenth = [steps // 10]
        yield finding("HF153", "train.optimizer.warmup_steps", message, "train.steps", use=tenth)


def _data(data: DataSection) -> Iterator[BrokenRule]:
    if data.path is None and data.mix is None:
        message = "is missing: the file or folder with the corpus; or data.mix, with several"
        yield finding("HF011", "data.path", message, "data.mix")
    if data.path is not None and data.mix is not None:
        message = "path and mix exclude each other; keep one"
        yield finding("HF016", "data.mix", message, "data.path")
    yield from _mix(data)
    formats = {each.format for each in data.corpora.values()}
    if data.cut_long and not data.packed:
        message = f"cut_long is for examples of sft, the format is {data.format}; leave it out"
        yield finding("HF016", "data.cut_long", message, "data.format", use=[False])
    said = ", ".join(sorted(formats))
    if data.key is not None and not formats & {*RECORD_FORMATS}:
        message = f"key is for jsonl, parquet and arrow, the format is {said}; leave it out"
        yield finding("HF016", "data.key", message, "data.format", "data.mix", use=[None])
    if data.as_is and "text" not in formats:
        message = f"as_is is for text, the format is {said}; leave it out"
        yield finding("HF016", "data.as_is", message, "data.format", "data.mix", use=[False])


def _mix(data: DataSection) -> Iterator[BrokenRule]:
    for name, one in (data.mix or {}).items():
        key, data_format = f"data.mix.{name}", one.format or data.format
        if (data_format == "sft") != data.packed:
            message = (
                f"{data_format} beside {data.format}: examples of sft say what counts in the loss "
                "and do not mix with other formats; fine-tune in a run of its own, by --from"
            )
            all_are = all(each.format == "sft" for each in (data.mix or {}).values())
            offers: list[Offer] = [{"data.format": "sft"}] if all_are else []
            yield finding("HF715", key, message, "data.format", offers=offers)
        if one.key is not None and data_format not in RECORD_FORMATS:
            message = f"key is for jsonl, parquet and arrow, the format is {data_format}"
            yield finding("HF016", f"{key}.key", f"{message}; leave it out", "data.format")


def _float8(spec: JobSpec) -> Iterator[BrokenRule]:
    train, gpu = spec.train, spec.cluster.gpu
    if not train.float8 or spec.command is not None:
        return
    key, without = "train.float8", [False]
    offers: list[Offer]
    if train.precision != "bf16":
        message = f"float8 is for products in bf16, and precision is {train.precision}"
        offers = [{"train.precision": "bf16"}, {key: False}]
        yield finding("HF133", key, message, "train.precision", offers=offers)
    elif isinstance(spec.shape, Transformers):
        return  # HF140 says it
    elif isinstance(spec.shape, Plugin):
        message = "what the layers of a plug-in multiply is not known"
        yield finding("HF133", key, message, "model", use=without)
    elif spec.shape.num_experts > 1:
        message = "experts multiply in bf16, which is most of a layer's work"
        yield finding("HF133", key, message, "model", use=without)
    elif gpu in GPUS and not GPUS[gpu].float8:
        message = f"{gpu} does not multiply in float8"
        yield finding("HF133", key, message, "cluster.gpu", use=without)
    elif gpu != CPU and not train.compile:
        message = "without train.compile what is cast to float8 costs more than its products save"
        offers = [{"train.compile": True}, {key: False}]
        yield finding("HF190", key, message, "train.compile", "cluster.gpu", offers=offers)


def _sizes(spec: JobSpec) -> Iterator[BrokenRule]:
    sizes, nodes, least = spec.elastic.sizes, spec.cluster.nodes, spec.elastic.min_nodes or 1
    if sizes is None:
        return
    usable = sorted({nodes, *(size for size in sizes if least <= size <= nodes)}, reverse=True)
    if set(sizes) != set(usable):
        listed = ", ".join(map(str, sizes)) or "none"
        message = (
            f"{listed}: expected numbers from {least} (min_nodes) to {nodes} (the nodes of the "
            f"cluster), {nodes} among them"
        )
        yield finding("HF135", "elastic.sizes", message, "cluster.nodes", use=[usable])


def _validation(spec: JobSpec) -> Iterator[BrokenRule]:
    if spec.validation is None:
        return
    if spec.command is not None:
        message = "a command validates by itself (docs/scripts.md); leave the section out"
        yield finding("HF016", "validation", message, "command")
        return
    for key, each in spec.data.corpora.items():
        if each.path is not None and PurePath(spec.validation.path) == PurePath(each.path):
            message = f"{spec.validation.path} is {key} too: its loss says nothing about other data"
            yield finding("HF187", "validation.path", message, "data.path", "data.mix")


def _numbers(spec: JobSpec) -> Iterator[BrokenRule]:
    key, replicas = "numbers.replica_check_steps", spec.layout.dp_replicate
    if spec.numbers.replica_check_steps is None or replicas >= 3:
        return
    majority = "with three a majority names the node that computes wrong"
    if replicas == 2:
        message = f"of two replicas that differ nobody can say which is wrong; {majority}"
    else:
        held = "only norms, over tp, have" if spec.layout.tp > 1 else "nothing has"
        message = f"FSDP shards every parameter, so {held} replicas to compare; {majority}"
    enough = [degree for degree in reversed(divisors(max(1, spec.dp))) if degree >= 3][:2]
    yield finding("HF157", key, message, "layout", offers=instead("layout.dp_replicate", enough))


def _env(spec: JobSpec) -> Iterator[BrokenRule]:
    for name in spec.env.variables:
        if name in spec.env.secrets:
            message = f"{name} is in env.secrets too; keep one"
            yield finding("HF016", f"env.variables.{name}", message, "env.secrets")


def _slurm(spec: JobSpec) -> Iterator[BrokenRule]:
    slurm = spec.slurm
    for key, other, message in _EXCLUSIVE:
        if None not in (getattr(slurm, key), getattr(slurm, other)):
            yield finding("HF016", f"slurm.{key}", f"{message}; keep one", f"slurm.{other}")
    if slurm.array is not None and slurm.restart == "chain":
        message = "tasks of an array have one name, a successor would wait for all; use requeue"
        yield finding("HF016", "slurm.restart", message, "slurm.array")
    yield from _fabric("slurm", slurm)
    if slurm.segment is not None and (slurm.version or "0") < SEGMENT_SINCE:
        stated = f"says {slurm.version}" if slurm.version else "is not given"
        message = (
            f"sbatch has --segment since {SEGMENT_SINCE}, and slurm.version {stated}: state the "
            "cluster's (sbatch --version), or leave segment out"
        )
        yield finding("HF161", "slurm.segment", message, "slurm.version")
    if slurm.container is not None and spec.env.image is None:
        message = f"{slurm.container} runs an image, and env.image has none; name one"
        yield finding("HF164", "slurm.container", message, "env.image")
    for index, mount in enumerate(slurm.container_mounts):
        if "," in mount or not mount.startswith("/") or mount.count(":") > 2:
            message = f"expected /path, /path:/there or /path:/there:ro, found {mount}"
            key = "slurm.container_mounts"
            yield finding("HF015", f"{key}.{index}", message, key)


def _fabric(section: str, wish: Slurm | Kubernetes) -> Iterator[BrokenRule]:
    if wish.fabric_devices is not None and wish.fabric not in ("infiniband", "roce"):
        key, message = f"{section}.fabric", f"fabric: {wish.fabric} has no such devices"
        offers = instead(key, ["infiniband", "roce"])
        yield finding("HF016", f"{section}.fabric_devices", message, key, offers=offers)


def _kubernetes(spec: JobSpec) -> Iterator[BrokenRule]:
    wish, pods = spec.kubernetes, spec.cluster.nodes + spec.cluster.spares
    if wish.restart_limit is not None and wish.restart_limit < pods:
        message = (
            f"{wish.restart_limit} is less than the {pods} pods: one restart of each, as by an "
            "upgrade of the nodes, would end the job"
        )
        needs = ("cluster.nodes", "cluster.spares")
        yield finding("HF736", "kubernetes.restart_limit", message, *needs, use=[pods, None])
    if wish.gang and wish.queue is not None:
        message = "Kueue's queue starts all pods or none already; leave gang out"
        yield _pod_finding("gang", message, "queue")
    yield from _fabric("kubernetes", wish)
    if wish.gpu_resource in wish.rdma:
        yield _pod_finding("rdma", f"{wish.gpu_resource} is gpu_resource already", "gpu_resource")
    yield from _mounts(wish)
    given = dict.fromkeys(wish.rdma, "kubernetes.rdma")
    given |= {"cpu": "kubernetes.cpus", "memory": "kubernetes.memory"}
    given[wish.gpu_resource] = "cluster.gpus_per_node"
    for field, why in own_fields(wish.pod_patch, resources=given, mounts={*_TAKEN, wish.mount}):
        message = f"{field} is set by holdfast: {why}"
        yield finding("HF737", "kubernetes.pod_patch", message, "kubernetes")


def _mounts(wish: Kubernetes) -> Iterator[BrokenRule]:
    """Yield two things at one place of the pods, and names that are taken."""
    mounts = {wish.mount: "mount", **dict.fromkeys(_TAKEN, "holdfast's own")}
    for name, volume in wish.volumes.items():
        key = f"volumes.{name}"
        if name.startswith(RESERVED):
            yield _pod_finding(key, f"names with {RESERVED} are holdfast's own; use another")
        if volume.mount in mounts:
            message = f"{volume.mount} is {mounts[volume.mount]} already; mount it elsewhere"
            yield _pod_finding(f"{key}.mount", message, "mount")
        mounts[volume.mount] = f"volume {name}'s"
    if wish.mount in _TAKEN:
        yield _pod_finding("mount", f"{wish.mount} is holdfast's own; mount the claim elsewhere")


def _pod_finding(key: str, message: str, *needs: str) -> BrokenRule:
    keys = {f"kubernetes.{name}" for name in (key.partition(".")[0], *needs)}
    return BrokenRule("HF016", f"kubernetes.{key}", message, frozenset(keys))


def _family(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield keys of a family or plug-in that the model is not of."""
    if not isinstance(spec.model, ModelDimensions):
        return
    family, plugin = spec.model.family, spec.model.plugin
    if plugin is not None and "family" in spec.model.model_fields_set:
        yield finding("HF016", "model.plugin", "family and plugin exclude each other; keep one")
    mine = {each.name for each in dataclasses.fields(spec.shape)}
    for key in sorted(spec.model.model_fields_set - mine - {"family", "plugin"}):
        if getattr(spec.model, key) == type(spec.model).model_fields[key].get_default():
            continue
        others = [
            name
            for name, other in FAMILIES.items()
            if plugin is None and key in {each.name for each in dataclasses.fields(other)}
        ]
        message = f"{key} is not a key of {family if plugin is None else 'a plugin'}; leave it out"
        offers = instead("model.family", others)
        yield finding("HF016", f"model.{key}", message, "model.family", offers=offers)


def _model(spec: JobSpec) -> Iterator[BrokenRule]:
    shape = spec.shape
    yield from _family(spec)
    if isinstance(shape, Transformers) and spec.command is None:
        yield from _own_class(spec)
    for field, message, usable in _dimension_mistakes(shape):
        yield finding("HF023", f"model.{field}", message, use=usable)
    train, tp = spec.train, spec.layout.tp
    if train.compile and spec.layout.ep > 1:
        message = "no layer is compiled whose tokens go to other ranks, in numbers known there only"
        offers: list[Offer] = [{"layout.ep": 1}, {"train.compile": False}]
        yield finding("HF130", "train.compile", message, "layout", offers=offers)
    if train.compile and train.recompute == "full" and tp > 1 and spec.command is None:
        message = "torch compiles no layer of tp whose activations are all computed again"
        yield finding(
            "HF134",
            "train.recompute",
            message,
            *("train.compile", "layout"),
            use=["selective", "none"],
            offers=[{"train.compile": False}],
        )
    if spec.data.encodes and spec.data.tokenizer == "bytes" and shape.vocab_size < BYTES_VOCABULARY:
        message = f"{shape.vocab_size} is too small for bytes"
        yield finding("HF024", "model.vocab_size", message, "data", use=[BYTES_VOCABULARY])
    context = PUBLISHED_CONTEXT.get(spec.model_name)
    if context and spec.train.seq_len > context:
        message = (
            f"{spec.train.seq_len} tokens exceed the {context} that {spec.model_name} was "
            "published for (a model by its dimensions may have a rope_scaling_factor)"
        )
        yield finding("HF154", "train.seq_len", message, use=[context])


def _own_class(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield that no family has the model, and what is on that transformers' own class lacks."""
    if isinstance(spec.model, str):
        why = spec.no_family or "no family has it"
        message = f"{why}: transformers' own {spec.shape.architecture} trains it (docs/models.md)"
        yield finding("HF198", "model", message, offers=[{"model": {"hf": spec.model}}])
    train, packed = spec.train, spec.data.packed
    yield from own_class_findings(spec.shape, "train.float8", train.float8, without=False)
    yield from own_class_findings(spec.shape, "train.compile", train.compile, without=False)
    as_text = "text" if packed else spec.data.format
    yield from own_class_findings(spec.shape, "data.format", spec.data.format, without=as_text)


def _dimension_mistakes(shape: ModelShape) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield (key, message, values to use instead) for dimensions that contradict each other."""
    if isinstance(shape, Transformers):
        return  # transformers has built it
    yield from _layer_mistakes(shape)
    if shape.num_heads % shape.num_kv_heads:
        message = f"{shape.num_kv_heads} does not divide the {shape.num_heads} heads"
        yield "num_kv_heads", message, divisors(shape.num_heads)[:6]
    if not shape.head_dim and shape.dim % shape.num_heads:
        message = f"{shape.num_heads} does not divide dim {shape.dim}, and head_dim is not given"
        yield "num_heads", message, divisors(shape.dim)
    elif shape.head_size % 2:
        message = f"heads of {shape.head_size} are odd; rotary embeddings turn pairs"
        yield "head_dim", message, [shape.head_size + 1]


def _layer_mistakes(shape: ModelShape) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the same for experts, and for layers that differ."""
    if isinstance(shape, MixtureShape):
        experts, chosen = shape.num_experts, shape.experts_per_token
        if experts == 1:
            yield "num_experts", "1 is not a mixture; say how many, or use a family without", [8]
        elif chosen > experts:
            yield "experts_per_token", f"{chosen} is more than the {experts} experts", [2]
    if isinstance(shape, LayeredShape):
        kinds, window = set(shape.layer_types), shape.sliding_window
        if kinds == {SLIDING, FULL} and window is None:
            yield "sliding_window", f"null, but layer_types has {SLIDING}; say how many", [4096]
        elif kinds == {FULL} and window is not None:
            yield "layer_types", f"no layer sees the sliding_window {window}", [[SLIDING]]

"""`holdfast wrap` of a PyTorchJob: what it changes, what it refuses, and what its pods run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import run_cli
from launcher.node.as_task import as_pod, of_job
from launcher.plan.loading import load_spec
from launcher.spec.errors import UserError
from launcher.wrap.launches import job_of, launch_of
from launcher.wrap.manifest import is_manifest, wrap_manifest
from launcher.wrap.tasks import rank_of

HEAD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: own}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
          containers:
          - name: pytorch
            image: registry.local/train:1
            volumeMounts: [{name: data, mountPath: /data}]
"""
SCRIPT = HEAD + "            command:\n            - sh\n            - -c\n            - |\n"
PLAIN = HEAD + "            command: [torchrun, t.py]\n"
ENV = {
    "HOLDFAST_KIND": "pytorchjob",
    "HOLDFAST_JOB": "own",
    "HOLDFAST_RUNS": "/data/runs",
    "HOLDFAST_SHUTDOWN_S": "90",
    "POD_NAME": "own-worker-0",
    "PET_NNODES": "2:4",
}


def container_of(text, role="Worker"):
    (job,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "PyTorchJob")
    return job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("line", "holdfast"),
    [
        ("torchrun t.py", "holdfast"),
        ("A=1 B='x y' torchrun t.py > log | tee x; python after.py", "holdfast"),
        ("set -e; cd /x && accelerate launch t.py || exit", "holdfast"),
        ("$V/bin/torchrun t.py '{dp}' &> log\n# end", "holdfast"),
        ("/opt/venv/bin/torchrun a.py\n/opt/venv/bin/torchrun b.py", "/opt/venv/bin/holdfast"),
        ("x\n/opt/py/bin/python3 -u -m torch.distributed.run t.py", "/opt/py/bin/holdfast"),
        ("source /opt/venv/bin/activate\ndeepspeed t.py", "/opt/venv/bin/holdfast"),
        ("bash /workspace/run.sh", "holdfast"),
    ],
)
def test_the_command_of_a_shell_stays_whole(line, holdfast):
    text = SCRIPT + "".join(f"              {each}\n" for each in line.split("\n"))
    made = wrap_manifest(text, "job.yaml")
    command = container_of(made.text)["command"]
    assert command == [holdfast, "batch", "--", "sh", "-c", f"{line}\n"]
    assert any("script of the image" in note for note in made.notes) == ("run.sh" in line)


def with_containers(*more):
    return PLAIN + "".join(f"          - {json.dumps(each)}\n" for each in more)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PLAIN.replace("PyTorchJob", "MPIJob"), 1),
        (PLAIN.replace("kubeflow.org/v1", "kubeflow.org/v2beta1"), 1),
        (f"{PLAIN}---\n{PLAIN}", 1),
        (PLAIN.replace("torchrun, ", "python, ").replace("replicas: 2", "replicas: 1"), 12),
        (PLAIN.replace("command: [torchrun, t.py]", ""), 12),
        (PLAIN.replace("command: [torchrun, t.py]", "command: torchrun t.py"), 12),
        (PLAIN.replace("name: pytorch", "name: train"), 6),
        (with_containers({"name": "second", "command": ["torchrun", "t.py"]}), 16),
        (PLAIN.replace("persistentVolumeClaim: {claimName: data}", "emptyDir: {}"), 12),
        (PLAIN.replace("mountPath: /data", "mountPath: /data, readOnly: true"), 12),
        (PLAIN + "            env: [{name: POD_IP, value: 10.0.0.1}]\n", 16),
        (PLAIN.replace("torchrun, ", "holdfast, batch, --, torchrun, "), 12),
        (SCRIPT + "              python a.py\n", 12),
        (PLAIN + "            resources: {limits: {google.com/tpu: 4}}\n", 12),
        (PLAIN.replace("torchrun, ", "torchrun, --nonsense, "), 15),
        (PLAIN.replace("torchrun, ", "torchrun, --standalone, "), 15),
        (PLAIN.replace("torchrun, ", "torchrun, --nnodes=1, "), 15),
        (f"{PLAIN}  note: |+\n    a\n\n\n", 4),
    ],
)
def test_a_manifest_that_cannot_be_wrapped(text, line):
    with pytest.raises(UserError) as caught:
        wrap_manifest(text, "job.yaml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.line) == ("HF169", line)


def test_all_that_is_wrong_is_said_at_once():
    text = with_containers({"name": "second", "command": ["torchrun", "t.py"]})
    text = text.replace("[torchrun, t.py]", "[sleep, t.py]").replace("Claim: {", "Claims: {")
    text = text.replace(
        "mountPath: /data}]", "mountPath: /data}]\n            env: [{name: POD_IP}]"
    )
    for found, lines in ((text, [17]), (text[: text.index("          - {")], [12, 12, 15])):
        with pytest.raises(UserError) as caught:
            wrap_manifest(found, "job.yaml")
        assert [problem.where.line for problem in caught.value.problems] == lines


def test_a_process_for_each_pod_is_a_worker():
    made = wrap_manifest(PLAIN.replace("torchrun, ", "python3, -u, "), "job.yaml")
    assert container_of(made.text)["command"] == [
        "holdfast",
        "batch",
        "--",
        "python3",
        "-u",
        "t.py",
    ]
    assert any("rank 0 may be in any pod" in note for note in made.notes)
    launch = rank_of(("python3", "-u", "t.py"), {**ENV, "HOLDFAST_PODS": "2"}, "/p")
    assert (launch.nodes, launch.workers) == ((2, 2), 1)
    assert launch.command[-3:] == ("python3", "-u", "t.py")
    assert rank_of(("python3", "-u", "t.py"), {**ENV, "HOLDFAST_KIND": "jobset"}, "/p") is None
    own = {"RANK": "7", "OMP_NUM_THREADS": "3", "A": "b"}
    agents = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    agents |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    seen = as_pod({**own, **of_job(own), **agents, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
    assert seen == {**agents, "OMP_NUM_THREADS": "3", "A": "b"}


JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: own}
spec:
  failurePolicy: {maxRestarts: 3}
  replicatedJobs:
  - name: driver
    template: {spec: {template: {spec: {containers: [{name: a, image: b, command: [sleep, "9"]}]}}}}
  - name: workers
    replicas: 2
    template:
      spec:
        parallelism: 4
        completions: 4
        backoffLimit: 0
        template:
          spec:
            restartPolicy: OnFailure
            volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
            containers:
            - name: tcpx
              image: c
            - name: gpu
              image: registry.local/train:1
              volumeMounts: [{name: data, mountPath: /data}]
              command: [bash, -c]
              args: ["export A=1; torchrun --nnodes=$NNODES --node_rank=$RANK t.py"]
"""


def test_a_jobset_replaces_a_lost_pod_alone():
    made = wrap_manifest(JOBSET, "job.yaml")
    before, job = yaml.safe_load(JOBSET)["spec"], yaml.safe_load(made.text)["spec"]
    assert job["failurePolicy"] == {"maxRestarts": 0}
    assert job["replicatedJobs"][0] == before["replicatedJobs"][0]
    workers = job["replicatedJobs"][1]["template"]["spec"]
    assert (workers["backoffLimit"], workers["backoffLimitPerIndex"]) == (80, 20)
    assert "successPolicy" not in workers, "the first pod to end must not end the others"
    rules = workers["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        "gpu"
    }
    pod = workers["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert [each["name"] for each in pod["initContainers"]] == ["tcpx"]
    (container,) = pod["containers"]
    assert container["command"] == ["holdfast", "batch", "--", "bash", "-c"]
    env = {row["name"]: row.get("value") for row in container["env"]}
    assert (env["HOLDFAST_KIND"], env["HOLDFAST_PODS"]) == ("jobset", "8")
    told = " ".join(made.notes)
    for word in ("failurePolicy", "driver", "backoffLimit: 0", "restartPolicy: OnFailure"):
        assert word in told


def test_a_job_beside_the_training_stays():
    other = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: get-data}\n"
    assert wrap_manifest(f"{other}---\n{JOBSET}", "job.yaml").text.startswith(other)


def test_a_job_of_its_own_is_wrapped_as_that_of_a_jobset():
    job = yaml.safe_load(JOBSET)["spec"]["replicatedJobs"][1]["template"]
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "own"}}
    made = yaml.safe_load(wrap_manifest(yaml.safe_dump({**head, **job}), "job.yaml").text)
    assert made["spec"]["backoffLimit"] == 80
    env = {row["name"]: row for row in made["spec"]["template"]["spec"]["containers"][0]["env"]}
    source = env["HOLDFAST_JOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert source == "metadata.labels['batch.kubernetes.io/job-name']"


RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch, uid: a1, resourceVersion: "3", labels: {a: b}}
spec:
  mlPolicy: {numNodes: 1, torch: {}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec: {template: {spec: {containers: [{name: node, image: registry.local/base:1}]}}}
"""
TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: own, namespace: research}
spec:
  runtimeRef: {name: torch}  # of all
  trainer:
    numNodes: 3
    image: registry.local/train:1
    command: [torchrun, t.py]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
"""


def test_a_trainjob_gets_a_runtime_of_its_own():
    made = wrap_manifest(f"{RUNTIME}---\n{TRAINJOB}", "job.yaml", claim="runs")
    runtime, job = yaml.safe_load_all(made.text)
    assert made.images == ("registry.local/train:1",)
    assert runtime["kind"] == job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    assert runtime["metadata"] == {
        "name": "torch-own",
        "namespace": "research",
        "labels": {"a": "b"},
    }
    assert job["spec"]["runtimeRef"]["name"] == "torch-own"
    assert job["spec"]["trainer"]["command"] == ["holdfast", "batch", "--", "torchrun", "t.py"]
    inner = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["backoffLimit"], "completions" in inner) == (60, False)
    (container,) = inner["template"]["spec"]["containers"]
    env = {row["name"]: row.get("value") for row in container["env"]}
    assert (env["HOLDFAST_KIND"], env["HOLDFAST_PODS"], env["HOLDFAST_GPUS"]) == (
        *("trainjob", "3", "8"),
    )
    in_runtime = RUNTIME.replace("base:1}", "base:1, command: [bash, -c, torchrun t.py]}")
    in_runtime += "---\n" + TRAINJOB.replace("    command: [torchrun, t.py]\n", "")
    runtime, job = yaml.safe_load_all(wrap_manifest(in_runtime, "job.yaml", claim="x").text)
    inner = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    command = inner["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["holdfast", "batch", "--", "bash"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRAINJOB, 5),
        (f"{TRAINJOB}---\n{RUNTIME}", 5),
        (f"{RUNTIME}---\n{TRAINJOB.replace('torchrun', 'python')}", 19),
        (f"{RUNTIME.replace('-step: trainer', '-step: other')}---\n{TRAINJOB}", 7),
    ],
)
def test_a_trainjob_that_cannot_be_wrapped(text, line):
    with pytest.raises(UserError) as caught:
        wrap_manifest(text, "job.yaml", claim="runs")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.line) == ("HF169", line)


_SIDECAR = """\
          - name: exporter   # no part of the training
            image: registry.local/exporter:1
            args: [--port, "9400"]
            env:
            - {name: NOTE, value: "a, b"}
"""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("before", ["", "          initContainers: [{name: fetch, image: a}]\n"])
def test_other_containers_become_sidecars(before, first):
    text = PLAIN.replace("          containers:\n", f"{before}          containers:\n")
    head, dash, own = text.partition("          - name: pytorch\n")
    text = f"{head}{_SIDECAR}{dash}{own}" if first else f"{text}{_SIDECAR}"
    for written in (text, json.dumps(yaml.safe_load(text))):
        made = wrap_manifest(written, "job.yaml")
        pods = yaml.safe_load(made.text)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"][
            "spec"
        ]
        (own_container,) = pods["containers"]
        assert own_container["command"][:3] == ["holdfast", "batch", "--"]
        (sidecar,) = yaml.safe_load(_SIDECAR)
        assert pods["initContainers"][-1] == {**sidecar, "restartPolicy": "Always"}
        assert len(pods["initContainers"]) == 1 + bool(before)
        assert made.sidecars == ("exporter",)


@pytest.mark.parametrize(
    ("policy", "limit", "written"),
    [("OnFailure", 6, 40), ("ExitCode", 0, 40), ("OnFailure", None, None), (None, 90, 90)],
)
def test_the_operator_replaces_pods_for_as_long_as_agents_want(policy, limit, written):
    text = PLAIN
    if policy:
        text = text.replace("replicas: 2\n", f"replicas: 2\n      restartPolicy: {policy}\n")
    if limit is not None:
        text = text.replace("spec:\n", f"spec:\n  runPolicy: {{backoffLimit: {limit}}}\n", 1)
    made = wrap_manifest(text, "job.yaml")
    (job,) = yaml.safe_load_all(made.text)
    assert job["spec"]["runPolicy"].get("backoffLimit") == written
    assert any(f"backoffLimit: {limit} is 40" in note for note in made.notes) == (written == 40)
    assert any("ExitCode now" in note for note in made.notes) == (policy == "OnFailure")


CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: data}}
spec: {{accessModes: [{mode}], resources: {{requests: {{storage: 1Gi}}}}}}
---
"""


@pytest.mark.parametrize("runs", [None, "/data/x"])
@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("emptyDir: {}", "emptyDir"),
        ("emptyDir: {medium: Memory}", "emptyDir"),
        ("ephemeral: {volumeClaimTemplate: {}}", "ephemeral"),
        ("configMap: {name: x}", "configMap"),
        (None, "ReadWriteOnce"),
        ("persistentVolumeClaim: {claimName: data}}, {name: x", "subPathExpr"),
    ],
)
def test_a_run_directory_that_cannot_outlive_a_pod_is_refused(source, word, runs):
    text = PLAIN.replace("persistentVolumeClaim: {claimName: data}", source or "")
    if source is None:
        text = CLAIM.format(mode="ReadWriteOnce") + PLAIN
    if word == "subPathExpr":
        text = text.replace("mountPath: /data", "mountPath: /data, subPathExpr: $(POD_NAME)")
    with pytest.raises(UserError) as caught:
        wrap_manifest(text, "job.yaml", runs=runs)
    assert caught.value.code == "HF169"
    if runs or word in ("ReadWriteOnce", "subPathExpr"):
        assert word in str(caught.value)
    made = wrap_manifest(text, "job.yaml", claim="runs")
    assert made.run_dir == "/holdfast/runs/own"
    (job,) = (each for each in yaml.safe_load_all(made.text) if each["kind"] == "PyTorchJob")
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found = volumes[mounts["/holdfast"]]["persistentVolumeClaim"]
    assert found == {"claimName": "runs"}


def test_a_claim_that_has_no_room_is_refused_and_volumes_of_that_name_are_volumes():
    own = PLAIN.replace("name: data,", "name: holdfast-runs,")
    assert wrap_manifest(own, "job.yaml").run_dir == "/data/runs/own"
    for text in (own, PLAIN.replace("mountPath: /data", "mountPath: /holdfast")):
        with pytest.raises(UserError, match="HF169"):
            wrap_manifest(text, "job.yaml", claim="runs")


def test_what_may_be_storage_of_one_node_is_said():
    hosts = PLAIN.replace("persistentVolumeClaim: {claimName: data}", "hostPath: {path: /lustre}")
    made = wrap_manifest(hosts, "job.yaml", runs="/data/x")
    assert any("/data/x must be a file system" in note for note in made.notes)
    assert any("kubectl get pvc data" in n for n in wrap_manifest(PLAIN, "job.yaml").notes)
    shared = CLAIM.format(mode="ReadWriteMany") + PLAIN
    assert wrap_manifest(shared, "job.yaml").notes == ()


@pytest.mark.parametrize("own", ["", "annotations: {sidecar.istio.io/inject: 'true'}"])
def test_pods_are_kept_out_of_a_service_mesh_unless_the_manifest_says_otherwise(own):
    text = PLAIN.replace("template:\n", f"template:\n        metadata: {{{own}}}\n", 1)
    (job,) = yaml.safe_load_all(wrap_manifest(text, "job.yaml").text)
    head = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]
    assert head["annotations"]["linkerd.io/inject"] == "disabled"
    given = {**head.get("labels", {}), **head["annotations"]}["sidecar.istio.io/inject"]
    assert given == ("true" if own else "false")


_JUNK = (None, 1, True, "x", "", [], {}, [1], [None], [{}], {"a": 1}, [{"name": ["x"]}], [[]])


def places_in(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from places_in(each, (*path, key))


@pytest.mark.process
def test_a_manifest_of_another_shape_is_refused_or_wrapped_and_nothing_else():
    whole = yaml.safe_load(PLAIN)
    pod = whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["containers"][0]["env"] = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    for path in list(places_in(whole))[1:]:
        for junk in _JUNK:
            job = copy.deepcopy(whole)
            here = job
            for part in path[:-1]:
                here = here[part]
            here[path[-1]] = junk
            with contextlib.suppress(UserError):
                wrap_manifest(json.dumps(job), "job.json")


def test_a_secret_in_the_command_is_refused_before_the_job_waits():
    for words in ("--api-key, a1b2c3d4e5f6", "--hf-token=hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"):
        with pytest.raises(UserError) as caught:
            wrap_manifest(PLAIN.replace("t.py]", f"t.py, {words}]"), "job.yaml")
        assert caught.value.code == "HF163"


def test_several_shared_volumes_want_a_folder_to_be_named():
    text = PLAIN.replace("[{name: data, m", "[{name: data, mountPath: /b}, {name: data, m")
    with pytest.raises(UserError, match="HF169"):
        wrap_manifest(text, "job.yaml")
    assert wrap_manifest(text, "job.yaml", runs="/b/mine").run_dir == "/b/mine/own"
    for elsewhere in ("/c", "/data/../c", "b"):
        with pytest.raises(UserError, match="HF169"):
            wrap_manifest(text, "job.yaml", runs=elsewhere)


def test_an_alias_is_wrapped_once():
    text = PLAIN.replace("Worker:", "Master:").replace("template:", "template: &pods")
    text += "    Worker: {replicas: 3, template: *pods}\n"
    made = wrap_manifest(text, "job.yaml").text
    assert container_of(made) == container_of(made, "Master")
    assert container_of(made)["command"] == ["holdfast", "batch", "--", "torchrun", "t.py"]
    assert made.count("HOLDFAST_KIND") == 1


def test_a_manifest_in_json_stays_json():
    text = json.dumps(yaml.safe_load(PLAIN))
    assert is_manifest(text)
    assert json.loads(wrap_manifest(text, "job.json").text)["spec"]["runPolicy"] == {
        "cleanPodPolicy": "Running"
    }


# --- what is the user's stays -------------------------------------------------------------------

_TEXTS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=12)
_KEYS = st.from_regex(r"[a-z]{3,9}", fullmatch=True).map(lambda key: f"x{key}")
_VALUES = st.recursive(
    _TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.dictionaries(_KEYS, _VALUES, max_size=3)
_ENV = st.lists(
    st.builds(lambda key, value: {"name": key.upper(), "value": value}, _KEYS, _TEXTS), max_size=2
)


class _Dumper(yaml.SafeDumper):
    """Quotes what PyYAML takes for a text and kubectl for a number, as 0E0."""

    def represent_text(self, text):
        style = "'" if re.match(r"[-+.]?[0-9]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def without_ours(after, before):
    """Return a wrapped job without what has been added to `before`."""
    if isinstance(after, dict) and isinstance(before, dict):
        kept = {name: value for name, value in after.items() if name in before}
        return {name: without_ours(value, before[name]) for name, value in kept.items()}
    if isinstance(after, list) and isinstance(before, list):
        ours = ("HOLDFAST_", "POD_", "NODE_NAME", "holdfast-")
        kept = [
            row
            for row in after
            if not (isinstance(row, dict) and str(row.get("name")).startswith(ours))
        ]
        return [without_ours(*pair) for pair in zip(kept, before, strict=True)]
    return after


@given(
    st.lists(_FIELDS, min_size=6, max_size=6),
    _ENV,
    st.lists(_TEXTS, max_size=3),
    st.tuples(st.sampled_from([None, True, False]), st.sampled_from([20, 80, 10**6])),
    st.booleans(),
)
def test_what_is_the_users_stays(fields, env, args, style, first):
    job = yaml.safe_load(PLAIN)
    role = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = role["template"]["spec"]
    container = pod["containers"][0]
    for place, more in zip(
        (job, job["metadata"], job["spec"], role, pod, container), fields, strict=True
    ):
        own = dict(place)
        place.clear()
        place.update({**more, **own} if first else {**own, **more})
    container["command"] = ["torchrun", "t.py", *args]
    if env:
        container["env"] = env
    before = copy.deepcopy(job)
    flow, width = style
    text = yaml.dump(
        job,
        Dumper=_Dumper,
        default_flow_style=flow,
        sort_keys=False,
        width=width,
        allow_unicode=True,
    )
    made = yaml.safe_load(wrap_manifest(f"# mine\n{text}", "job.yaml").text)
    command = container_of(yaml.safe_dump(made))["command"]
    assert command == ["holdfast", "batch", "--", *container["command"]]
    made_role = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    made_role["template"]["spec"]["containers"][0]["command"] = container["command"]
    assert without_ours(made, before) == before
    assert made_role["restartPolicy"] == "ExitCode"


@given(st.lists(_TEXTS.filter(lambda text: not text.startswith("---")), max_size=4))
def test_comments_and_other_documents_stay(comments):
    own = "".join(f"# {text}\n" for text in comments)
    other = f"apiVersion: v1\nkind: ConfigMap\ndata: {{a: b}}\n{own}"
    text = f"{own}{other}---\n{own}{PLAIN}{own}--- # more\n{other}"
    made = wrap_manifest(text, "job.yaml").text
    assert made.startswith(f"{own}{other}---\n{own}{HEAD[:60]}")
    assert made.endswith(f"{own}--- # more\n{other}")


TIMEOUT = "[torchrun, --shutdown-timeout, '{}', t.py]"


@pytest.mark.parametrize(
    ("asked", "own", "grace", "shutdown"),
    [
        ("500", None, 560, 530),
        ("7.5", None, 120, 90),
        ("500", 900, 900, 870),
        ("$(WAIT)", None, 120, 90),
        ("1200", 300, 1260, 1230),
    ],
)
def test_a_pod_has_as_long_as_its_torchrun_gives_workers(asked, own, grace, shutdown):
    text = PLAIN.replace("[torchrun, t.py]", TIMEOUT.format(asked))
    if own is not None:
        old = "          containers:"
        text = text.replace(old, f"          terminationGracePeriodSeconds: {own}\n{old}")
    made = wrap_manifest(text, "job.yaml").text
    pods = yaml.safe_load(made)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pods["terminationGracePeriodSeconds"] == grace
    values = {row["name"]: row.get("value") for row in container_of(made)["env"]}
    assert values["HOLDFAST_SHUTDOWN_S"] == str(shutdown)


def test_roles_have_the_longest_time_of_any_and_a_script_says_its_own():
    master = PLAIN[PLAIN.index("    Worker:") :].replace("Worker", "Master")
    text = PLAIN + master.replace("[torchrun, t.py]", TIMEOUT.format(300))
    made = yaml.safe_load(wrap_manifest(text, "job.yaml").text)
    roles = made["spec"]["pytorchReplicaSpecs"].values()
    times = {role["template"]["spec"]["terminationGracePeriodSeconds"] for role in roles}
    assert times == {360}
    shell = SCRIPT + "              torchrun --shutdown-timeout=200 t.py\n"
    assert "terminationGracePeriodSeconds: 260" in wrap_manifest(shell, "job.yaml").text


# --- in the pods --------------------------------------------------------------------------------


def test_the_job_of_a_pod_is_that_of_its_torchrun_and_its_operator():
    argv = ("torchrun", "--nproc-per-node=auto", "--rdzv-endpoint=a:1", "t.py", "--lr", "1")
    env = {**ENV, "HOLDFAST_GPUS": "8", "PET_RDZV_CONF": "join_timeout=40"}
    job = load_spec(job_of(launch_of(argv, env), env))
    assert (job.name, job.command, job.device) == ("own", ("t.py", "--lr", "1"), "cuda")
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (4, 8)
    assert (job.elastic.min_nodes, job.elastic.join_timeout_s) == (2, 40.0)
    assert job.elastic.stop_grace_s == 60.0
    for asked, granted in (("45", 45.0), ("0", 1.0), ("500", 60.0)):
        own = launch_of(("torchrun", f"--shutdown-timeout={asked}", "t.py"), env)
        assert load_spec(job_of(own, env)).elastic.stop_grace_s == granted
    with pytest.raises(UserError, match="HF169"):
        launch_of(argv, ENV)
    for command in (("srun", "torchrun", "t.py"), ("numactl", "-N0", "torchrun", "t.py")):
        assert launch_of(command, ENV) is None, "what starts torchrun runs first"


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """The environment of a pod, and what becomes of its process."""
    started = []
    for name, value in {**ENV, "HOLDFAST_RUNS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    def execve(path, argv, env):
        started.append((path, argv, env))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    return started


def becomes(*words):
    with pytest.raises(SystemExit):
        run_cli(["batch", "--", *words])


def test_a_pod_makes_the_run_and_becomes_its_main_process(tmp_path, pod, capsys):
    folder = tmp_path / "own"
    becomes("torchrun", "t.py", "1")
    assert json.loads((folder / "job.json").read_text())["command"] == ["t.py", "1"]
    path, argv, env = pod[0]
    assert (path, argv[1:]) == (argv[0], ["-P", "-m", "launcher.node", "pod", str(folder)])
    assert env["POD_NAME"] == "own-worker-0"
    becomes("torchrun", "t.py", "2")  # a job made again
    assert json.loads((folder / "job.json").read_text())["command"] == ["t.py", "2"]
    assert run_cli(["batch", "--", "torchrun"]) == 93
    assert "HF169" in capsys.readouterr().err
    assert len(pod) == 2


def test_storage_that_cannot_be_written_is_left_to_the_main_process(tmp_path, pod, capsys):
    (tmp_path / "own").write_text("in the way")
    becomes("torchrun", "t.py")
    assert str(tmp_path / "own") in capsys.readouterr().err
    assert len(pod) == 1


def test_the_command_tells_what_the_image_needs_and_no_secret(tmp_path, capsys):
    path, out = tmp_path / "job.yaml", tmp_path / "out.yaml"
    path.write_text(PLAIN + "            env: [{name: WANDB_API_KEY, value: a1b2c3d4e5f6}]\n")
    assert run_cli(["wrap", str(path)]) == 0
    told = capsys.readouterr()
    assert "a1b2c3d4e5f6" not in told.out
    assert "registry.local/train:1" in told.err
    assert run_cli(["wrap", str(path), "--runs", "/data/x", "-o", str(out)]) == 0
    assert "/data/x/own" in capsys.readouterr().err
    assert "a1b2c3d4e5f6" in out.read_text()
    assert run_cli(["wrap", str(out)]) == 2
    assert f"{out}:12: HF169" in capsys.readouterr().err

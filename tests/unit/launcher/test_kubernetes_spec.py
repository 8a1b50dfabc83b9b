"""What the section `kubernetes:` of a job file takes."""

from __future__ import annotations

import pytest

from launcher.render.fabric import fabric_variables
from launcher.spec.kubernetes import quantity_bytes


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        ("kubernetes.namespace=Train", "HF015 kubernetes.namespace: expected a name"),
        ("kubernetes.namespace=a.b", "HF015 kubernetes.namespace: expected a name"),
        ("kubernetes.namespace=yes", None),
        ("kubernetes.image='a b'", "HF015 kubernetes.image: expected an image"),
        ("kubernetes.claim=Runs", "HF015 kubernetes.claim: expected a name"),
        ("kubernetes.mount=runs", "HF015 kubernetes.mount: expected an absolute path"),
        ("kubernetes.mount=/a:b", "HF015 kubernetes.mount: expected an absolute path"),
        ("kubernetes.mount=/a/../b", "HF015 kubernetes.mount: expected an absolute path"),
        ("kubernetes.mount=/dev/shm", "HF016 kubernetes.mount: /dev/shm is holdfast's own"),
        ("kubernetes.memory=lots", "HF015 kubernetes.memory: expected bytes as 512Gi"),
        ("kubernetes.memory=512GiB", "HF015 kubernetes.memory: expected bytes as 512Gi"),
        ("kubernetes.memory=0", "HF015 kubernetes.memory: expected bytes as 512Gi"),
        ("kubernetes.memory=true", "HF012 kubernetes.memory: expected a text"),
        ("kubernetes.memory=1.5Ti", None),
        ("kubernetes.memory=68719476736", None),
        ("kubernetes.cpus=250m", None),
        ("kubernetes.cpus=1.5", None),
        ("kubernetes.cpus=8", None),
        ("kubernetes.cpus=0", "HF015 kubernetes.cpus: expected CPUs as 8, 1.5 or 250m"),
        ("kubernetes.cpus=0m", "HF015 kubernetes.cpus: expected CPUs as 8, 1.5 or 250m"),
        ("kubernetes.cpus=1.5m", "HF015 kubernetes.cpus: expected CPUs as 8, 1.5 or 250m"),
        ("kubernetes.cpus=2Gi", "HF015 kubernetes.cpus: expected CPUs as 8, 1.5 or 250m"),
        ("kubernetes.gpu_resource=gpu", "HF015 kubernetes.gpu_resource: expected DOMAIN/NAME"),
        ("kubernetes.rdma={hugepages-2Mi: 4}", "HF015 kubernetes.rdma.hugepages-2Mi: expected"),
        ("kubernetes.rdma={rdma/ib: 0}", "HF013 kubernetes.rdma.rdma/ib: expected at least 1"),
        ("kubernetes.rdma={nvidia.com/gpu: 8}", "HF016 kubernetes.rdma: nvidia.com/gpu is"),
        ("kubernetes.node_selector={a b: c}", "HF015 kubernetes.node_selector.a b: expected a key"),
        ("kubernetes.node_selector={a: 'b c'}", "HF015 kubernetes.node_selector.a: expected a lab"),
        ("kubernetes.labels={holdfast.dev/run: a}", "is set by holdfast"),
        ("kubernetes.labels={kueue.x-k8s.io/queue-name: a}", "is set by holdfast"),
        ("kubernetes.labels={cost: 4711}", None),
        ("kubernetes.labels={cost: 1.5}", "HF012 kubernetes.labels.cost: expected a text"),
        ("kubernetes.topology={}", "HF016 kubernetes.topology: expected {required: LABEL}"),
        ("kubernetes.topology={required: a, preferred: b}", "HF016 kubernetes.topology: expected"),
        ("kubernetes.topology={require: a}", "did you mean kubernetes.topology.required?"),
        ("kubernetes={gang: true, queue: q}", "HF016 kubernetes.gang: Kueue's queue starts all"),
        ("kubernetes={fabric_devices: mlx5}", "HF016 kubernetes.fabric_devices: fabric: none"),
        ("kubernetes.exclude=['a,b']", "HF015 kubernetes.exclude[0]: expected a node's host name"),
        ("kubernetes.tolerations=[{operator: Equal}]", "without a key every taint is meant"),
        ("kubernetes.tolerations=[{operator: Exists, key: a, value: b}]", "Exists has no value"),
        ("kubernetes.tolerations=[{key: a, seconds: 5}]", "effect: NoExecute alone"),
        ("kubernetes.volumes={d: {mount: /d}}", "expected claim: NAME or host_path: PATH"),
        ("kubernetes.volumes={d: {claim: a, host_path: /b, mount: /d}}", "one of the two"),
        ("kubernetes.volumes={d: {claim: a, mount: /holdfast/}}", "/holdfast is mount already"),
        ("kubernetes.volumes={d: {claim: a, mount: /dev/shm}}", "holdfast's own already"),
        ("kubernetes.volumes={holdfast-x: {claim: a, mount: /d}}", "names with holdfast- are"),
        ("kubernetes.volumes={D: {claim: a, mount: /d}}", "HF015 kubernetes.volumes.D: expected"),
        ("kubernetes.volumes={d: {claim: a, mount: /d, ro: true}}", "HF010 kubernetes.volumes.d"),
        ("kubernetes.security={non_root: true, run_as_user: 0}", "contradict each other"),
        ("kubernetes.security={run_as_user: root}", "HF012 kubernetes.security.run_as_user"),
        ("kubernetes.security={run_as_usr: 5}", "did you mean kubernetes.security.run_as_user?"),
        ("kubernetes.board=etcd", "is not one of its choices; use file or kubernetes"),
        ("kubernetes.deadline_s=0", "HF013 kubernetes.deadline_s: expected at least 1"),
        ("kubernetes.annotations={a: 'ghp_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2'}", "HF163"),
        ("env.secrets={A: {}}", "HF163 env.secrets.A: expected {file: PATH}, {env: NAME} or"),
        ("env.secrets={A: {kubernetes: a}}", "HF015 env.secrets.A.kubernetes: expected NAME/KEY"),
        ("env.secrets={A: {kubernetes: hub/token, file: /a}}", None),
        ("env.variables={POD_NAME: a}", "HF165 env.variables.POD_NAME: POD_NAME is set by"),
    ],
)  # fmt: skip
def test_mistakes_are_named(make_spec, mistakes, set_, message):
    if message is None:
        make_spec(set_)
        return
    assert any(message in line for line in mistakes(set_)), mistakes(set_)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 << 29), ("2T", 2 * 10**12), ("0.1k", 100)],
)
def test_quantities_are_those_of_kubernetes(text, size):
    assert quantity_bytes(text) == size


def test_the_fabric_is_the_platforms_own(make_spec):
    spec = make_spec(
        "slurm.fabric=efa", "kubernetes.fabric=infiniband", "kubernetes.fabric_devices=mlx5_3"
    )
    found = {each.name: each.value for each in fabric_variables(spec, spec.kubernetes, 32)}
    assert found["NCCL_IB_HCA"] == "mlx5_3"
    assert found["OMP_NUM_THREADS"] == "4"
    assert "FI_PROVIDER" not in found

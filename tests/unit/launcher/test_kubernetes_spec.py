"""What the section `kubernetes:` of a job file takes."""

from __future__ import annotations

import pytest
from problem_lines import has_parts

from launcher.render.fabric import fabric_variables
from launcher.spec.kubernetes import quantity_bytes


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        ("kubernetes.namespace=Train", "HF015 kubernetes.namespace:"),
        ("kubernetes.namespace=a.b", "HF015 kubernetes.namespace:"),
        ("kubernetes.namespace=yes", None),
        ("kubernetes.image='a b'", "HF015 kubernetes.image:"),
        ("kubernetes.claim=Runs", "HF015 kubernetes.claim:"),
        ("kubernetes.mount=runs", "HF015 kubernetes.mount:"),
        ("kubernetes.mount=/a:b", "HF015 kubernetes.mount:"),
        ("kubernetes.mount=/a/../b", "HF015 kubernetes.mount:"),
        ("kubernetes.mount=/dev/shm", "HF016 kubernetes.mount: /dev/shm"),
        ("kubernetes.memory=lots", "HF015 kubernetes.memory: ... 512Gi"),
        ("kubernetes.memory=512GiB", "HF015 kubernetes.memory: ... 512Gi"),
        ("kubernetes.memory=0", "HF015 kubernetes.memory: ... 512Gi"),
        ("kubernetes.memory=true", "HF012 kubernetes.memory:"),
        ("kubernetes.memory=1.5Ti", None),
        ("kubernetes.memory=68719476736", None),
        ("kubernetes.cpus=250m", None),
        ("kubernetes.cpus=1.5", None),
        ("kubernetes.cpus=8", None),
        ("kubernetes.cpus=0", "HF015 kubernetes.cpus: ... 8, 1.5 or 250m"),
        ("kubernetes.cpus=0m", "HF015 kubernetes.cpus: ... 8, 1.5 or 250m"),
        ("kubernetes.cpus=1.5m", "HF015 kubernetes.cpus: ... 8, 1.5 or 250m"),
        ("kubernetes.cpus=2Gi", "HF015 kubernetes.cpus: ... 8, 1.5 or 250m"),
        ("kubernetes.gpu_resource=gpu", "HF015 kubernetes.gpu_resource: ... DOMAIN/NAME"),
        ("kubernetes.rdma={hugepages-2Mi: 4}", "HF015 kubernetes.rdma.hugepages-2Mi:"),
        ("kubernetes.rdma={rdma/ib: 0}", "HF013 kubernetes.rdma.rdma/ib: ... least 1"),
        ("kubernetes.rdma={nvidia.com/gpu: 8}", "HF016 kubernetes.rdma: nvidia.com/gpu"),
        ("kubernetes.node_selector={a b: c}", "HF015 kubernetes.node_selector.a b:"),
        ("kubernetes.node_selector={a: 'b c'}", "HF015 kubernetes.node_selector.a:"),
        ("kubernetes.labels={holdfast.dev/run: a}", "HF015 kubernetes.labels."),
        ("kubernetes.labels={kueue.x-k8s.io/queue-name: a}", "HF015 kubernetes.labels."),
        ("kubernetes.labels={cost: 4711}", None),
        ("kubernetes.labels={cost: 1.5}", "HF012 kubernetes.labels.cost:"),
        ("kubernetes.topology={}", "HF016 kubernetes.topology: ... {required: LABEL}"),
        ("kubernetes.topology={required: a, preferred: b}", "HF016 kubernetes.topology:"),
        ("kubernetes.topology={require: a}", "HF010 ... topology.required?"),
        ("kubernetes={gang: true, queue: q}", "HF016 kubernetes.gang: ... Kueue"),
        ("kubernetes={fabric_devices: mlx5}", "HF016 kubernetes.fabric_devices: fabric: none"),
        ("kubernetes.exclude=['a,b']", "HF015 kubernetes.exclude[0]:"),
        ("kubernetes.tolerations=[{operator: Equal}]", "HF016 kubernetes.tolerations"),
        ("kubernetes.tolerations=[{operator: Exists, key: a, value: b}]", "HF016 ... Exists"),
        ("kubernetes.tolerations=[{key: a, seconds: 5}]", "HF016 ... NoExecute"),
        ("kubernetes.volumes={d: {mount: /d}}", "HF016 ... claim: NAME"),
        ("kubernetes.volumes={d: {claim: a, host_path: /b, mount: /d}}", "HF016 ... host_path"),
        ("kubernetes.volumes={d: {claim: a, mount: /holdfast/}}", "HF016 ... /holdfast"),
        ("kubernetes.volumes={d: {claim: a, mount: /dev/shm}}", "HF016 ... /dev/shm"),
        ("kubernetes.volumes={holdfast-x: {claim: a, mount: /d}}", "HF016 ... holdfast-"),
        ("kubernetes.volumes={D: {claim: a, mount: /d}}", "HF015 kubernetes.volumes.D:"),
        ("kubernetes.volumes={d: {claim: a, mount: /d, ro: true}}", "HF010 kubernetes.volumes.d"),
        ("kubernetes.security={non_root: true, run_as_user: 0}", "HF016 kubernetes.security"),
        ("kubernetes.security={run_as_user: root}", "HF012 kubernetes.security.run_as_user"),
        ("kubernetes.security={run_as_usr: 5}", "HF010 ... security.run_as_user?"),
        ("kubernetes.board=etcd", "HF014 kubernetes.board: ... use file or kubernetes"),
        ("kubernetes.deadline_s=0", "HF013 kubernetes.deadline_s: ... least 1"),
        ("kubernetes.annotations={a: 'ghp_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2'}", "HF163"),
        ("env.secrets={A: {}}", "HF163 env.secrets.A: ... {file: PATH}, {env: NAME}"),
        ("env.secrets={A: {kubernetes: a}}", "HF015 env.secrets.A.kubernetes: ... NAME/KEY"),
        ("env.secrets={A: {kubernetes: hub/token, file: /a}}", None),
        ("env.variables={POD_NAME: a}", "HF165 env.variables.POD_NAME:"),
    ],
)  # fmt: skip
def test_mistakes_are_named(make_spec, mistakes, set_, message):
    if message is None:
        make_spec(set_)
        return
    assert has_parts(mistakes(set_), message), mistakes(set_)


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

"""Which machines the next submission does without, and that the platform is told so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import KINDS, bundle_of, template_of

from elastic_trainer.record.events import Event
from launcher.platforms.kubernetes.documents import read_bundle, stamped
from launcher.platforms.slurm.parse import excluded
from launcher.record.failures import ExcludedMachine, excluded_machines
from launcher.render.pod import HOSTNAME

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def event(name, t=100.0, *, node="pod-0", **fields):
    return Event(event=name, t_unix=t, t_mono=t, node=node, fields=fields)


def evicted(member, host, t=100.0):
    return event("member.evicted", t, member=member, host=host, reason="two failures")


def readmitted(member, host, t=200.0):
    return event("member.readmitted", t, member=member, host=host, reason="two failures")


def hosts(*events, since=0.0):
    ordered = sorted(events, key=lambda one: one.t_unix)
    return [each.host for each in excluded_machines(ordered, since_unix=since)]


def test_the_node_of_a_pod_x():
    [found] = excluded_machines([evicted("pod-1", "n7")])
    assert found == ExcludedMachine(host="n7", member="pod-1", reason="two failures")
    assert str(found) == "n7 (pod-1): two failures"


def test_a_member_that_is_called_as_its_node():
    [found] = excluded_machines([evicted("node7", "node7")])
    assert str(found) == "node7: two failures"


def test_those_of_earlier_submissions_have_had_their_time():
    events = [evicted("a", "n1", 100.0), evicted("b", "n2", 300.0)]
    assert hosts(*events) == ["n1", "n2"]
    assert hosts(*events, since=200.0) == ["n2"]
    assert hosts(*events, since=300.5) == []


def test_a_pod_that_moved_leaves_its_node_excluded():
    assert hosts(evicted("a", "n1"), evicted("a", "n2", 300.0)) == ["n1", "n2"]
    assert hosts(evicted("a", "n1"), readmitted("a", "n2")) == ["n1"]


def test_a_node_that_was_let_back_in_is_fine_until_it_is_excluded_again():
    events = [evicted("a", "n1"), readmitted("b", "n1")]
    assert hosts(*events) == []
    assert hosts(*events, evicted("c", "n1", 300.0)) == ["n1"]


MEMBERS, HOSTS = st.sampled_from(["a", "b", "c"]), st.sampled_from(["n1", "n2"])
EVENTS = st.lists(
    st.one_of(
        st.builds(evicted, MEMBERS, HOSTS, st.floats(0, 1e3)),
        st.builds(readmitted, MEMBERS, HOSTS, st.floats(0, 1e3)),
        st.builds(event, st.just("epoch.formed"), st.floats(0, 1e3)),
    )
)


@given(EVENTS, st.floats(0, 1e3), st.floats(0, 1e3))
def test_later_submissions_exclude_fewer_nodes_and_each_has_a_reason(events, one, other):
    early, late = sorted((one, other))
    assert set(hosts(*events, since=late)) <= set(hosts(*events, since=early))
    evictions = [e for e in events if e.event == "member.evicted" and e.t_unix >= late]
    assert len(hosts(*events, since=late)) <= len(evictions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listed", [[], ["n1"]])
@pytest.mark.parametrize("topology", [None, "rack"])
def test_pods_are_kept_off_besides_what_the_job_file_excludes(kind, listed, topology):
    values = {"kubernetes.exclude": listed}
    if topology:
        values["kubernetes.topology"] = {"preferred": topology}
    bundle = read_bundle(bundle_of(values, kind))
    before = json.dumps(bundle.documents)
    documents = stamped(bundle, namespace="train", attempt=1, submission="x", without=["n7", "n2"])
    affinity = template_of(documents)["spec"]["affinity"]
    off = {"key": HOSTNAME, "operator": "NotIn", "values": sorted([*listed, "n2", "n7"])}
    assert affinity["nodeAffinity"] == {
        REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [off]}]}
    }
    assert ("podAffinity" in affinity) == bool(topology)
    assert json.dumps(bundle.documents) == before, "what was rendered stays as it was"
    again = stamped(bundle, namespace="train", attempt=2, submission="x")
    assert "n7" not in json.dumps(again)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", "n2,n7"),
        ('#SBATCH --exclude="node[07,19],x"\n', "node[07,19],x,n2,n7"),
        ("#SBATCH --exclude=n1\n", "n1,n2,n7"),
        ("echo '#SBATCH --exclude=n1'\n", "n2,n7"),
    ],
)
def test_nodes_that_a_script_leaves_out_already(line, wanted):
    assert excluded(f"#!/bin/bash\n#SBATCH --nodes=2\n{line}srun x\n", ["n2", "n7"]) == wanted

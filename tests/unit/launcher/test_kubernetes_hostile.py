"""Whatever stands in a job file stays a value: the manifests are read back and compared."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes_jobs import KINDS, bundle_of, expanded, template_of, variables_of

from launcher.render.kubernetes_yaml import to_yaml
from launcher.render.pod import escape
from launcher.spec.errors import UserError
from launcher.spec.source import parse_value

SPECIAL = (
    "yes", "no", "on", "off", "y", "N", "true", "False", "null", "~", "Null", "1", "1.0", "1e3",
    "0x1f", "0o17", "017", "1_000", "12:30:00", "2026-01-01", ".inf", ".nan", "-", "?", ":", "a: b",
    "a #b", "# a", "- a", "[a]", "{a: b}", "&a", "*a", "!a", "!!str a", "|", ">", "%YAML 1.2", "@a",
    "`a`", "'", '"', "\\", "a\\nb", "---", "...", "<<", "=", "$(HOME)", "$$(HOME)", "$HOME", "$",
    "$$", "$(POD_NAME)", "{{ a }}", "é", "日本", "😀", "\u2028", "\u00a0", "\ufeff", "\x85", " a",
    "a ", "a\tb", "\x7f", "\ud800", "\n", "a\nb\n", "x" * 300, "", " ", "🏳️‍🌈",
)  # fmt: skip
HOSTILE = st.one_of(
    st.sampled_from(SPECIAL),
    st.lists(st.sampled_from(SPECIAL), min_size=2, max_size=3).map("".join),
    st.text(max_size=30),
)
KEYS = (
    "namespace", "context", "image", "image_pull_policy", "image_pull_secrets.0", "python",
    "service_account", "queue", "priority_class", "topology|required", "scheduler",
    "node_selector|a", "exclude.0", "memory", "shm", "gpu_resource", "fabric", "fabric_devices",
    "claim", "mount", "image_paths.0", "board", "labels|a", "annotations|a",
    "volumes|a|mount", "volumes|a|claim", "volumes|a|host_path",
)  # fmt: skip
OTHERS = (
    "name", "data.path", "data.tokenizer", "checkpoint.dir", "env.venv", "env.image",
    "env.variables.A", "env.secrets.A.kubernetes", "network.interface",
    "elastic.failure_domain",
)  # fmt: skip
ALL_KEYS = [f"kubernetes|{key}" if "|" in key else f"kubernetes.{key}" for key in KEYS]
ALL_KEYS += OTHERS
ALLOWED = {
    "HF012", "HF013", "HF014", "HF015", "HF016", "HF163", "HF165", "HF722", "HF720", "HF725",
    "HF727",  # levels of a topology, which pods do not know
    "HF201",  # a home (~name) of a user who is not known here
}  # fmt: skip


def both_parsers(text):
    """Return what a YAML 1.2 and a YAML 1.1 parser make of `text`; they must agree."""
    new = [
        parse_value(part, "job.yaml") for part in re.split("^---\n", text, flags=re.MULTILINE)[1:]
    ]
    old = list(yaml.safe_load_all(text))
    assert json.dumps(old) == json.dumps(new)
    return new


def rendered(values, kind, **places):
    """Return the bundle and its documents, or the codes that the job is refused with."""
    try:
        bundle = bundle_of(values, kind, **places)
    except UserError as error:
        return None, {problem.code for problem in error.problems}
    return bundle, both_parsers(bundle["manifests.yaml"])


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | HOSTILE.filter(
        lambda text: not any(0xD800 <= ord(char) <= 0xDFFF for char in text)
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=3
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(SPECIAL[:40]), _plain, min_size=1), min_size=1))
def test_any_plain_data_is_read_back_by_both_kinds_of_parsers(documents):
    assert both_parsers(to_yaml(documents)) == documents


@given(HOSTILE, st.dictionaries(st.sampled_from(["HOME", "POD_NAME", "a"]), st.just("gone")))
@example("$$$(HOME)", {"HOME": "x"})
def test_kubernetes_replaces_nothing_in_what_is_escaped(text, known):
    assert expanded(escape(text), known) == text


@given(st.sampled_from(ALL_KEYS), HOSTILE, st.sampled_from(KINDS))
def test_a_value_is_refused_or_stands_in_the_manifests_as_it_is(key, value, kind):
    volume = {"mount": "/volume"} | ({} if key.endswith("host_path") else {"claim": "a"})
    around = {"kubernetes|volumes|a": volume} if "|volumes|" in key else {}
    bundle, documents = rendered({**around, key: value}, kind)
    if bundle is None:
        assert documents <= ALLOWED, documents
        return
    names = [each["kind"] for each in documents]
    assert names[-1] == {"pytorchjob": "PyTorchJob", "jobset": "JobSet"}.get(kind, "TrainJob")
    assert bundle["job.json"] == documents[0]["data"]["job.json"]
    pod = template_of(documents)
    if key.startswith("kubernetes|labels"):
        assert all(each["metadata"]["labels"]["a"] == value for each in documents)
    if key.startswith("kubernetes|annotations"):
        assert pod["metadata"]["annotations"]["a"] == value
    if key == "kubernetes.namespace":
        assert {each["metadata"]["namespace"] for each in documents} == {value}
    if key == "kubernetes.image":
        assert pod["spec"]["containers"][0]["image"] == value
    if key == "env.variables.A":
        assert expanded(variables_of(pod["spec"])["A"], {"HOME": "x", "POD_NAME": "y"}) == value
    if key == "kubernetes.python":
        (container,) = pod["spec"]["containers"]
        assert expanded(container["command"][0], {"HOME": "x"}) == value
        assert container["lifecycle"]["preStop"]["exec"]["command"][0] == value


@given(HOSTILE, st.sampled_from(KINDS))
def test_a_run_may_be_called_anything(run_id, kind):
    if run_id in ("", ".", "..") or any(char in run_id for char in "/\0\ud800"):
        return
    if any(0xD800 <= ord(char) <= 0xDFFF for char in run_id):
        return
    bundle, documents = rendered({}, kind, run_id=run_id)
    if bundle is None:
        assert documents == {"HF166"}
        return
    (container,) = template_of(documents)["spec"]["containers"]
    assert expanded(container["command"][-1], {"HOME": "x"}) == f"/holdfast/{run_id}"
    assert documents[-1]["metadata"]["annotations"]["holdfast.dev/run-id"] == run_id


@pytest.mark.parametrize("text", SPECIAL)
def test_every_special_text_is_read_back(text):
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        return  # no character; job files refuse it
    assert both_parsers(to_yaml([{"a": text, "b": [text]}])) == [{"a": text, "b": [text]}]

"""What Slurm takes and never starts is found before; what it starts is never refused."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.platforms.slurm import admission, parse
from launcher.platforms.slurm.admission import SlurmCluster, problems, request_of
from launcher.render.shell import sbatch_option

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm-22.05" / "admission"
"""What a real Slurm 22.05.8 with accounts says of itself, and what came of each job there."""
VERDICTS = [line.split(" | ") for line in (GOLDEN / "verdicts.txt").read_text().splitlines()]
CODES = {
    "Invalid account or account/partition combination specified": "HF683",
    "Invalid qos specification": "HF683",
    "AssocMaxWallDurationPerJobLimit": "HF684",
    "AssocGrpGRES": "HF684",
    "AssocMaxNodePerJobLimit": "HF684",
    "QOSMaxNodePerJobLimit": "HF684",
    "QOSMaxGRESPerUser": "HF684",
    "QOSMaxWallDurationPerJobLimit": "HF684",
    "PartitionNodeLimit": "HF680",
    "PartitionTimeLimit": "HF682",
    "PartitionConfig": "HF681",
    "PartitionDown": "HF180",
}
"""Slurm's words -> code."""


@cache
def said(name):
    return (GOLDEN / f"{name}.txt").read_text()


def rows(name, columns=admission.ASSOCIATION_COLUMNS):
    return admission.table(said(name), columns)


def cluster(account="ml", **other):
    known = (GOLDEN / f"account-{account}.txt").exists()
    found = SlurmCluster(
        config=parse.settings(said("config")),
        partitions=parse.records(said("partitions")),
        nodes=parse.parse_sinfo(said("sinfo")),
        user="nobody",
        associations=rows("associations"),
        accounts=[row for row in rows(f"account-{account}") if not row["User"]] if known else [],
        qos=rows("qos", admission.QOS_COLUMNS),
    )
    return dataclasses.replace(found, **other)


def job(options):
    """Return the request of a script with some options."""
    pairs = (option.removeprefix("--").partition("=") for option in options.split())
    lines = [f"#SBATCH {sbatch_option(name, value)}" for name, _, value in pairs]
    return request_of("\n".join(["#!/bin/bash", *lines, "true"]))


def codes(found):
    return [problem.code for problem in found]


def judged(options, **other):
    asked = job(options)
    return codes(problems(asked, cluster(asked.account, **other)))


@pytest.mark.parametrize(("options", "verdict"), VERDICTS)
def test_it_says_what_slurm_does(options, verdict):
    found = judged(options)
    _, _, reason = verdict.partition(": ")
    if verdict == "started":
        assert found == []
    elif reason == "Requested node configuration is not available":
        assert {"HF680", "HF681"} & {*found}
    elif reason.startswith("Job's account not permitted"):
        assert found == [], "an account below another one, which later versions let in"
    else:
        assert found == [CODES[reason]]


@pytest.mark.parametrize("part", ["config", "partitions", "nodes", "associations", "qos"])
def test_what_is_not_known_is_not_judged(part):
    """Whatever Slurm does not say, no job that it starts is refused."""
    missing = {"config": {}, "partitions": (), "nodes": (), "associations": None, "qos": None}
    for options, verdict in VERDICTS:
        found = judged(options, **{part: missing[part]})
        assert set(found) <= set(judged(options)), options
        assert found == [] or verdict != "started", options


def test_of_a_silent_slurm_nothing_is_judged():
    assert [problems(job(options), SlurmCluster()) for options, _ in VERDICTS] == [[]] * len(
        VERDICTS
    )


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("--nodes=3 --account=ml --partition=short", ["3 nodes", "short", "2", "main"]),
        (
            "--nodes=2 --account=ml --partition=short --time=120",
            ["02:00:00", "short", "01:00:00", "main"],
        ),
        ("--nodes=4 --gpus-per-node=8", ["3 of 4", "gpu:8", "gpu:4"]),
        ("--nodes=5", ["5 nodes", "main", "4"]),
        ("--nodes=4 --exclude=n[1-2]", ["2", "excluded", "--all-nodes"]),
        ("--nodes=1 --account=moon", ["moon", "big", "ml"]),
        ("--nodes=1 --account=ml --qos=long", ["long", "ml", "normal"]),
        ("--nodes=4 --account=big", ["big", "node=3", "4"]),
        ("--nodes=1 --account=ml --time=3-0", ["time=1-00:00:00", "3-00:00:00"]),
    ],
)
def test_a_message_has_the_values(options, values):
    asked = job(options)
    [found] = problems(asked, cluster(asked.account))
    assert [value for value in values if value not in found.message] == []
    assert found.where.key


def test_a_partition_that_would_do_is_named_if_it_is_open():
    [found] = problems(job("--nodes=3 --partition=short --account=ml"), cluster())
    assert "main" in found.message
    assert "off" not in found.message


def test_without_a_qos_of_its_own_a_job_may_get_any_that_the_user_has():
    lifted = "--nodes=3 --partition=short"
    assert judged(f"{lifted} --account=big") == [], "QOS over would lift the partition's limit"
    assert judged(f"{lifted} --account=big --qos=normal") == ["HF680"]
    assert judged("--nodes=4 --account=big") == ["HF684"], "over a limit with each of them"


def test_one_of_several_partitions_is_enough():
    assert judged("--nodes=3 --partition=short,main --account=ml") == []
    assert judged("--nodes=5 --partition=short,main --account=ml") == ["HF680", "HF680"]
    assert judged("--nodes=5 --partition=short,unknown --account=ml") == []


@pytest.mark.parametrize(
    "lifted",
    [
        {"config": {"MaxNodeCount": "64"}},
        {"config": {"MaxNodeCount": "4"}, "nodes": ()},
    ],
)
def test_nodes_that_may_be_added_later_are_not_missed(lifted):
    assert judged("--nodes=5 --account=ml", **lifted) == []


def test_of_a_slurm_whose_configuration_is_not_known_nothing_is_judged():
    """Plugins may change the job, and nodes may be added: only the configuration says so."""
    assert [judged(options, config={}) for options, _ in VERDICTS] == [[]] * len(VERDICTS)


def test_nodes_that_sinfo_does_not_show_are_not_missed():
    """Powered down, in a cloud: they count to the partition, and Slurm starts them."""
    config = parse.settings(said("config"))
    del config["MaxNodeCount"]  # Slurm 21.08 does not have it
    more = [{**row, "TotalNodes": "64"} for row in parse.records(said("partitions"))]
    for options in ("--nodes=5 --account=ml", "--nodes=4 --account=ml --constraint=large"):
        assert len(judged(options, config=config)) == 1
        assert judged(options, config=config, partitions=more) == []


@pytest.mark.parametrize("kind", ["accounting_storage/none", ""])
def test_without_accounts_no_qos_lifts_a_limit_of_the_partition(kind):
    config = parse.settings(said("config")) | {"AccountingStorageType": kind}
    config["AccountingStorageEnforce"] = "none"
    unknown = {"config": config, "associations": None, "qos": None, "accounts": ()}
    assert judged("--nodes=3 --partition=short", **unknown) == ["HF680"]


def test_a_user_whom_the_database_does_not_know_is_left_to_sbatch():
    assert judged("--nodes=1 --account=ml", associations=[]) == []


def test_limits_in_percent_are_not_compared():
    """QOS of Slurm 23.11 with the flag Relative: node=2 is 2 % of all nodes."""
    asked = "--account=big --qos=long --nodes=4"
    assert judged(asked) == ["HF684"]
    relative = [
        {**row, "Flags": "DenyOnLimit,Relative", "MaxTRES": "node=2"}
        for row in rows("qos", admission.QOS_COLUMNS)
    ]
    assert judged(asked, qos=relative) == [], "nor the association's, which count after it"
    assert judged("--account=big --qos=long --nodes=1 --time=3-0", qos=relative) == ["HF684"]


@pytest.mark.parametrize(
    ("gres", "there", "has"),
    [
        ("gpu:h100:8", "gpu:h100:8(S:0-1)", True),
        ("gpu:8", "gpu:h100:4(S:0,2),gpu:a100:4(S:1)", True),
        ("gpu:h100:8", "gpu:a100:8", False),
        ("gpu:1g.10gb:7", "gpu:1g.10gb:7(S:0),gpu:3g.40gb:1", True),
        ("gpu:1g.10gb:8", "gpu:1g.10gb:7(S:0),gpu:3g.40gb:1", False),
        ("gpu:H100:8", "gpu:h100:8", True),
        ("gpu:h100:8", "gpu:8", True),
        ("nic:fast:4", "gpu:8,nic:fast:no_consume:4", True),
        ("lustre:1G", "lustre:no_consume:4G", True),
        ("gpu", "(null)", False),
    ],
)
def test_gres_in_all_its_forms(gres, there, has):
    line = parse.SEPARATOR.join(("main", "n[1-4]", "16", "16000", there, "(null)"))
    nodes = parse.parse_sinfo(line)
    found = judged(f"--nodes=4 --gres={gres}", nodes=nodes, associations=None)
    assert found == ([] if has else ["HF681"])


def test_no_limit_of_accounts_counts_that_is_not_enforced():
    config = parse.settings(said("config")) | {"AccountingStorageEnforce": "associations"}
    assert judged("--account=big --nodes=4", config=config) == []
    assert judged("--account=moon --nodes=4", config=config) == ["HF683"]
    none = config | {"AccountingStorageEnforce": "none"}
    assert judged("--account=moon --nodes=4", config=none) == []


@pytest.mark.parametrize(
    "script",
    [
        "",
        "#!/bin/bash\ntrue",
        "#SBATCH --nodes=2-4",
        "#SBATCH --nodes=2 --clusters=far",
        '#SBATCH --nodes=2\n#SBATCH --comment="changed by hand',
    ],
)
def test_a_script_that_asks_for_nothing_known_is_not_judged(script):
    assert request_of(script) is None


def test_excluded_nodes_are_those_of_the_script_and_of_the_call():
    found = request_of("#SBATCH --nodes=1\n#SBATCH --exclude=n[1-2]\n", ["n4"])
    assert found.excluded == {"n1", "n2", "n4"}


@given(nodes=st.integers(1, 8), gpus=st.integers(0, 9), minutes=st.integers(1, 5000))
def test_less_is_never_worse(nodes, gpus, minutes):
    def of(n, g, m):
        return judged(
            f"--account=ml --nodes={n} --time={m}" + (f" --gpus-per-node={g}" if g else "")
        )

    if not of(nodes, gpus, minutes):
        for n, g, m in ((max(1, nodes - 1), gpus, minutes), (nodes, max(0, gpus - 1), minutes)):
            assert of(n, g, m) == []
        assert of(nodes, gpus, max(1, minutes // 2)) == []


@given(text=st.text(), lines=st.lists(st.text(alphabet="=|,: \x1fabnN14()[]-\n"), max_size=6))
def test_garbage_is_no_error(text, lines):
    garbage = "\n".join([text, *lines])
    asked = job("--nodes=2 --account=ml --qos=long --gres=gpu:8 --cpus-per-task=4 --mem=1G")
    mixed = dataclasses.replace(
        cluster(),
        partitions=[{**row, "QoS": text, "MaxTime": text} for row in parse.records(garbage)],
        nodes=parse.parse_sinfo(garbage),
        associations=admission.table(garbage, admission.ASSOCIATION_COLUMNS),
        qos=admission.table(garbage, admission.QOS_COLUMNS),
        config=parse.settings(garbage) | {"AccountingStorageEnforce": "associations,limits,qos"},
    )
    for problem in problems(asked, mixed):
        assert problem.code.startswith("HF")

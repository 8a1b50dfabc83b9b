"""What is taken for a secret, what is not, and that no message repeats one."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import run_cli
from launcher.spec.errors import Problem, UserError, Where
from launcher.spec.reading import parse_spec
from launcher.spec.secret_forms import (
    MASK,
    find_secrets,
    is_secret,
    leaks,
    masked,
    masked_set,
)

JOB = """\
name: tiny
model: tiny
cluster: {nodes: 1, gpus_per_node: 2, gpu: cpu}
train: {seq_len: 64, global_batch: 8, steps: 5}
data: {path: .}
"""
ALNUM = string.ascii_letters + string.digits
# Put together here, so that no scanner takes this file for a leak.
TOKENS = [
    "hf_" + "aB3d" * 9,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2_" * 9,
    "glpat-" + "a1B2-" * 4,
    "xoxb-" + "123456789012-" * 2 + "abcdef",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ASIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "Sy-_5" * 7,
    "npm_" + "a1B2" * 9,
    "pypi-" + "AgEIcHlwaS5vcmc" * 4,
    "sk-proj-" + "a1B2" * 9,
    "sk-ant-api03-" + "a1B2" * 9,
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N",
    "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
]
ORDINARY = [
    "5f3d9a1c2b4e6f708192a3b4c5d6e7f809182736",  # a revision of git, and a key of W&B
    "sha256:" + "ab12" * 16,
    "registry.local:5000/team/holdfast@sha256:" + "ab12" * 16,
    "docker://$oauthtoken@nvcr.io#nvidia/pytorch:25.01-py3",
    "docker://registry:5000/x@sha256:ab",
    "123e4567-e89b-12d3-a456-426614174000",
    "/lustre/abcDEF123/+/kq9ZxXyYwWvVuUtT/data",
    "aGVsbG8gd29ybGQgdGhpcyBpcyBiYXNlNjQ=",
    "https://api.wandb.ai:8443/path?x=1",
    "s3://bucket/key/value",
    "python train.py --max_tokens 4096 --tokenizer gpt2 --key-padding 1 --KEY_VALUE_HEADS 8",
    "python train.py --eos_token </s> --pad-token <pad0> --image-token IMG_1 --bos_token '[B0]'",
    "python train.py --use_auth_token True --no-auth 1 --label_key label_1 --sort_key=length2",
    "python train.py model.num_tokens=1000000 trainer.key=val data.image_key=image0",
    "export HF_TOKEN=$(cat ~/.hf) WANDB_API_KEY=${WANDB_API_KEY:?missing} DB_PASS=`pass db`",
    "HF_TOKEN_PATH=/x/y SSH_KEY_PATH=/home/a/.ssh/id SSH_KEY=/home/a/.ssh/id KEYS=a,b",
    "curl https://me:${PASS}@host/x https://me:$PASS@host/y --password {password}",
    'python train.py --api-key "$KEY" --token --verbose --password',
    '[ "$TOKEN" == "" ] && test_auth.py::test_token',
    "sk-learn-image-classification-with-forests",
    "disk-usage-of-everything-under-the-sun-2",
    "the token: see the guide; password: ask ops",
    "--account=llm --auth=munge --constraint=h100 --licenses=lustre:1",
]
GIVEN = [
    ("python train.py --api-key s3cret --lr 1", "s3cret"),
    ("python train.py --api_key=s3cret", "s3cret"),
    ("python train.py --token hunter2", "hunter2"),
    ("python train.py trainer.wandb.apiKey=abc", "abc"),
    ("bash -c 'WANDB_API_KEY=abc python x'", "abc"),
    ('export DB_PASS="two words"; x', "two words"),
    ('{"password": "hunter"}', "hunter"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzKEY", "wJalrXUtnFEMI"),
    ("AWS_SECRET_ACCESS_KEY=/JalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzz1EY", "JalrXUtnFEMI"),
    ("git clone https://me:pa55@host/x", "pa55"),
    ("curl -H 'Authorization: Bearer abcdefghijklmnop1234'", "abcdefghijklmnop1234"),
    ("curl -H 'X-Api-Key: abc'", "abc"),
    ("wandb login " + "5f3d9a1c2b" * 4, "5f3d9a1c2b"),
    ("https://hooks.slack.com/services/" + "T0/B0/" + "a1B2" * 6, "a1B2"),
]  # fmt: skip
NAMES = ["WANDB_KEY", "DB_PASS", "GITHUB_PAT", "SSH_KEY", "MY_TOKEN", "A_SECRET", "PGPASSWORD",
         "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "MYSQL_PWD"]  # fmt: skip
PLAIN_NAMES = ["SSH_KEY_PATH", "HF_TOKEN_PATH", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "PWD",
               "SORT_KEY", "KEY_VALUE_HEADS", "PASSES", "AUTHOR", "SECRETARY"]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_values_are_no_secrets(text):
    assert list(find_secrets(text)) == []
    assert masked(text) == text


@pytest.mark.parametrize(("text", "secret"), GIVEN)
def test_what_is_given_to_a_name_is_known(text, secret):
    assert secret not in masked(text)
    assert MASK in masked(text)


@given(
    token=st.sampled_from(TOKENS),
    before=st.text(" =/,:'\"", max_size=5),
    after=st.text(" ,'\"\n", max_size=5),
)
def test_a_token_is_known_wherever_it_stands(token, before, after):
    assert token not in masked(before + token + after)


@given(st.from_regex(r"[0-9a-f]{7,64}|sha256:[0-9a-f]{64}|[0-9a-f-]{36}", fullmatch=True))
def test_digests_are_no_secrets(text):
    assert masked(f"registry/x@{text}") == f"registry/x@{text}"


@given(st.text(max_size=200))
def test_what_is_masked_once_stays_as_it_is(text):
    assert masked(masked(text)) == masked(text)


@given(name=st.sampled_from(NAMES), value=st.text(ALNUM + "!#%&+-_", min_size=6).filter(
    lambda text: not text.isdigit()
))  # fmt: skip
def test_names_tell_secrets(name, value):
    assert is_secret(name, value)
    assert [leak.secret for leak in leaks({"env": {"variables": {name: value}}})] == [value]


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_names_do_not(name):
    assert not is_secret(name, "hunter2")


@pytest.mark.parametrize("value", ["/home/me/.ssh/id_rsa", "~/key", "./x", "true", "0", "", "none"])
def test_where_a_key_is_and_switches_are_no_secrets(value):
    assert not is_secret("MY_TOKEN", value)


SPECS = [
    ("command: [train.py, --api-key, s3cretive]", (), "s3cretive"),
    ("command: train.py --hub_token=s3cretive", (), "s3cretive"),
    ("slurm: {setup: ['export WANDB_API_KEY=s3cretive']}", (), "s3cretive"),
    ("slurm: {comment: 'https://me:s3cretive@host'}", (), "s3cretive"),
    ("kubernetes: {annotations: {example.com/api-key: s3cretive}}", (), "s3cretive"),
    ("env: {variables: {WANDB_KEY: s3cretive}}", (), "s3cretive"),
    ("env: {variables: {DB_PASSWORD: 123456789}}", (), "123456789"),
    ("env: {secrets: {ANY: s3cretive}}", (), "s3cretive"),
    ("env: {secrets: {ANY: {env: " + "0a1b2c3d" * 5 + "}}}", (), "0a1b2c3d"),
    ("wandb_api_key: s3cretive", (), "s3cretive"),
    (f"nme: {TOKENS[0]}", (), TOKENS[0]),
    (f"{TOKENS[0]}: 1", (), TOKENS[0]),
    (f"# {TOKENS[1]}", (), TOKENS[1]),
    ("elastic: {min_nodes: 'password=s3cretive'}", (), "s3cretive"),
    ("", ("env.variables.DB_PASS=s3cretive",), "s3cretive"),
    ("", ("env.secrets.ANY=s3cretive",), "s3cretive"),
    ("", (f"command=train.py {TOKENS[2]}",), TOKENS[2]),
    ("", (f"data.path={TOKENS[5]}",), TOKENS[5]),
    ("", ("env.variables={DB_PASS: s3cretive}",), "s3cretive"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sets", "secret"), SPECS)
def test_a_job_file_with_a_secret_is_refused_and_nothing_repeats_it(line, sets, secret):
    with pytest.raises(UserError) as caught:
        parse_spec(f"{JOB}{line}\n", "job.yaml", sets)
    assert "HF163" in [problem.code for problem in caught.value.problems]
    assert secret not in str(caught.value)
    assert not any(secret in str(problem.to_dict()) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("env: {variables: {DB_PASS: *s3cretive}}", ()),
        ("env: {variables: {DB_PASS: !s3cretive}}", ()),
        ("env: {variables: {DB_PASS: s3cretive", ()),
        ('env: {variables: {DB_PASS: "\\s3cretive"}}', ()),
        ("env: {variables: {DB_PASS: s3cretive: x}}}", ()),
        ("", ("env.variables.DB_PASS='s3cretive",)),
        ("", ("env.variables.DB_PASS.x=s3cretive", "env.variables.DB_PASS=s3cretive")),
    ],
)
def test_mistakes_around_a_secret_do_not_repeat_it(line, sets):
    with pytest.raises(UserError) as caught:
        parse_spec(f"{JOB}{line}\n", "job.yaml", sets)
    assert "s3cretive" not in str(caught.value)


@pytest.mark.parametrize("text", ORDINARY)
def test_a_job_file_with_ordinary_values_is_taken(text):
    variables = {"A": text, "SSH_KEY_PATH": "/x", "MAX_TOKENS": "5", "HF_HUB_NO_TOKEN": "1"}
    parse_spec(f"{JOB}env:\n  variables: {variables}\n")


def test_references_are_taken():
    line = "env: {secrets: {WANDB_API_KEY: {env: WANDB_API_KEY}, DB_PASS: {file: /x/pass}}}"
    assert parse_spec(f"{JOB}{line}\n").env.secrets["DB_PASS"].file == "/x/pass"


def test_sets_are_shown_without_values_that_are_secrets():
    assert masked_set("env.variables.DB_PASS=a b c") == f"env.variables.DB_PASS={MASK}"
    assert masked_set("train.steps=5") == "train.steps=5"


def test_problems_leave_secrets_out_whoever_made_them():
    where = Where(f"/x/{TOKENS[0]}", 1, f"env.{TOKENS[0]}")
    problem = Problem("HF001", where, f"cannot read {TOKENS[1]}")
    assert not any(token in str(problem) for token in TOKENS)
    assert problem.message == f"cannot read {MASK}"


def test_usage_errors_leave_secrets_out(capsys):
    assert run_cli(["check", "a.yaml", TOKENS[0]]) == 2
    assert TOKENS[0] not in "".join(capsys.readouterr())


def test_long_texts_take_no_longer_than_their_length_allows():
    for text in ("a" * 100_000, "sk-" * 30_000, "A." * 40_000, "--pass " * 10_000, "://" * 30_000):
        assert masked(text) == text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["://a" * 30_000, "a:" * 50_000, "pass:" * 20_000])
def test_a_row_of_names_takes_no_longer_than_its_length_allows(text):
    assert masked(text) == text


def test_a_long_secret_is_masked_to_its_end():
    assert masked(f"--api-key {'a1' * 5000} b") == f"--api-key {MASK} b"

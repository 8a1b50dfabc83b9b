"""What looks like a secret in a text, and the text without it. Pure.

Job files, scripts and messages are kept and shown: a job file with a secret is refused (HF163), and
no message repeats one. A secret is known by its form, or by the name it is given to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

MASK: Final = "***"
"""What is shown in place of a secret."""


_FORMS: Final = {
    # huggingface.co/docs/hub/security-tokens
    "a Hugging Face token": r"\b(hf|api_org)_[A-Za-z0-9]{24,}",
    # github.blog/2021-04-05-behind-githubs-new-authentication-token-formats
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    # docs.gitlab.com/security/tokens/#token-prefixes
    "a GitLab token": r"\bgl(pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat)-[\w-]{18,}",
    # docs.slack.dev/authentication/tokens
    "a Slack token": (
        r"\b(xox[a-z]|xapp)-[\w-]{16,}|hooks\.slack\.com/services/(?P<secret>[\w/]{20,})"
    ),
    # docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    "an AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    # cloud.google.com/docs/authentication/api-keys
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    # github.blog/2021-09-23-announcing-npms-new-access-token-format
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}",
    # pypi.org/help/#apitoken
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    # platform.openai.com/docs/api-reference/authentication
    # The middle is bounded, so that the search stays linear; words with hyphens have no such run.
    "an API key": r"\bsk-([\w-]{0,40}[-_])?[A-Za-z0-9]{20,}[\w-]*",
    # rfc-editor.org/rfc/rfc7519: base64url of '{"' is eyJ
    "a JSON web token": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}(\.[\w-]*)?",
    # docs.wandb.ai/ref/cli/wandb-login
    "a Weights & Biases key": (
        r"\bwandb[ \t]+login\b[^\n;|&]{0,200}?[ \t](?P<secret>[0-9a-f]{40})\b"
    ),
    # rfc-editor.org/rfc/rfc6750
    "a bearer token": r"(?i)\b(bearer|basic)[ \t]+(?P<secret>[A-Za-z0-9._~+/-]{16,}=*)",
    # rfc-editor.org/rfc/rfc7468
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY[^\n]*(\n[^\n]*)*",
    # rfc-editor.org/rfc/rfc3986, 3.2.1
    "a URL with a password": r"://[^\s/:@]*:(?P<secret>(?![${<*])[^\s/@]+)@",
}
"""What is a secret wherever it is -> what it looks like, by the source named; of a pattern with
a group `secret` only that is it."""
_COMPILED: Final = {what: re.compile(pattern) for what, pattern in _FORMS.items()}

_CERTAIN: Final = re.compile(
    r"PASSWORD$|PASSWD$|PASSPHRASE$|API_?KEY$|^SSHPASS$|(^|_)(SECRET|CREDENTIALS?)$"
    r"|(^|_)(ACCESS|SECRET|PRIVATE|ENCRYPTION|SIGNING|DEPLOY|LICENSE|ACCOUNT|STORAGE|MASTER|SERVICE"
    r"|SSH|WANDB|COMET|NEPTUNE|CLEARML|HF|OPENAI|ANTHROPIC|AZURE|AWS|GCP)_?KEY$"
    r"|(^|_)(HF|HUB|HUGGINGFACE|WANDB|AUTH|ACCESS|API|BEARER|REFRESH|SESSION|SECURITY|JWT|OAUTH"
    r"|GITHUB|GH|GITLAB|SLACK|BOT|NPM|PYPI)_?TOKEN$"
    r"|(^|_)(GITHUB|GH|GITLAB|AZURE|ADO)_?PAT$"
)
"""Names of secrets, in capitals: what they are given is one, unless it says where to find it."""
_LIKELY: Final = re.compile(r"(^|_)(TOKEN|AUTH|AUTHORIZATION|PASS|PWD|PAT)$")
"""The same of environment variables; elsewhere only of what looks drawn at random."""
_OF_TEXTS: Final = re.compile(
    r"(^|_)(BOS|EOS|PAD|UNK|SEP|CLS|MASK|EOT|EOD|EOM|BOI|EOI|IMAGE|IMG|VIDEO|AUDIO|VISION|SPECIAL"
    r"|STOP|START|BEGIN|END|PREFIX|SUFFIX|MIDDLE|THINK|CONTEXT|PLACEHOLDER)_TOKEN$"
)
"""Tokens of a vocabulary (huggingface.co/docs/transformers/main_classes/tokenizer)."""
_NO_ENVIRONMENT: Final = frozenset({"PWD", "OLDPWD"})
_KEY: Final = re.compile(r"(^|_)KEY$")
_RANDOM_KEY: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/]{16,}={0,2}")
"""Of any other key, as SORT_KEY: most are names of columns."""
_RANDOM: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s<\[|]{6,}|[A-Za-z0-9+/_-]{32,}")
_PLAIN: Final = re.compile(r"(true|false|yes|no|on|off|none|null|auto|)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_PATH: Final = re.compile(r"(~|\.{0,2})/[^\s]*")
_AWS_SECRET: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9/+]{40}")
"""Such a key may begin with a slash."""
_REFERENCE: Final = re.compile(r"\$[A-Za-z_{(].*|[`<{%].*|\*+", re.DOTALL)
"""What a shell fills in, and placeholders."""
_NO_VALUE: Final = re.compile(rf"-.*|{_REFERENCE.pattern}", re.DOTALL)
"""What may follow a flag and is not its value, or not a secret."""
_NO_NAME: Final = re.compile(r"[0-9a-f]{32,}|[A-Za-z0-9]{40,}")
"""A key where the name of a variable belongs."""
_ASSIGNED: Final = re.compile(
    r"(?<![\w.$-])(?<!\$\{)(?P<flag>--?)?(?P<name>[A-Za-z_][\w.-]*)[\"']?"
    r"(?P<sign>[ \t]*[=:](?![=:])[ \t]*|[ \t]+)"
    r"(?:\\?\"(?P<double>[^\"\n]*)\"|'(?P<single>[^'\n]*)'|(?P<bare>[^\s\"']{1,1024}))"
)
"""NAME=value, "name": "value", --name value; of a bare value the beginning, or a row of names
would take a time that grows with its square."""
_REST: Final = re.compile(r"[^\s\"']*")
_SENTENCE: Final = re.compile(r"[a-z]+[.,;]?[ \t]+[A-Za-z]")
"""What may follow `password: `."""
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Leak:
    """A secret in plain data."""

    path: tuple[str | int, ...]
    what: str
    """`a GitHub token`, or `the value of --api-key`."""
    secret: str
    name: str = ""
    """The name it was given to; empty: it was known by its form."""


def is_secret(name: str, value: str, *, is_variable: bool | None = None) -> bool:
    """Whether `value` is a secret, judged by the name of the variable, key or flag it is given to.

    `is_variable`: the name is that of an environment variable; None: it is if in capitals.
    """
    last = re.split(r"[./]", name.strip("-"))[-1]
    if is_variable is None:
        is_variable = _VARIABLE.fullmatch(last) is not None
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).replace("-", "_").upper()
    if _PLAIN.fullmatch(value) or snake in _NO_ENVIRONMENT or not snake:
        return False
    if _PATH.fullmatch(value) and not _AWS_SECRET.fullmatch(value):
        return False
    if _CERTAIN.search(snake):
        return True
    if _LIKELY.search(snake) and not _NUMBER.fullmatch(value):
        of_text = not is_variable and _OF_TEXTS.search(snake)
        return is_variable or (not of_text and _RANDOM.fullmatch(value) is not None)
    return bool(_KEY.search(snake) and _RANDOM_KEY.fullmatch(value))


def find_secrets(text: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield (what it is, start, end, name it was given to) of the secrets in a text."""
    for what, pattern in _COMPILED.items():
        for found in pattern.finditer(text):
            group = "secret" if found.groupdict().get("secret") is not None else 0
            yield what, *found.span(group), ""
    at = 0
    while (match := _ASSIGNED.search(text, at)) is not None:
        kind = next(kind for kind in ("double", "single", "bare") if match[kind] is not None)
        name, sign, value = match["name"], match["sign"], match[kind]
        # What is no value may be the next name.
        at = match.end("name")
        if not sign.strip() and (match["flag"] is None or value.startswith("-")):
            continue
        if _REFERENCE.fullmatch(value):
            continue
        if ":" in sign and kind == "bare" and _SENTENCE.match(text, match.start("bare")):
            continue
        if is_secret(name, value):
            at = match.end()
            start, end = match.span(kind)
            if kind == "bare" and (rest := _REST.match(text, end)):
                at = end = rest.end()
            yield f"the value of {match['flag'] or ''}{name}", start, end, name


def masked(text: str) -> str:
    """Return `text` with MASK in place of every secret."""
    spans = sorted((start, end) for _, start, end, _ in find_secrets(text))
    shown, done = "", 0
    for start, end in spans:
        if start >= done:
            shown += text[done:start] + MASK
        done = max(done, end)
    return shown + text[done:]


def masked_set(text: str) -> str:
    """Return a `--set KEY=VALUE` as it may be shown."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    value = value.strip()
    if equals and any(leaks(value, path)):
        return f"{key}={MASK}"
    return masked(text)


def leaks(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[Leak]:
    """Yield the secrets in the plain values of a job file, at `path` of it."""
    if isinstance(data, dict):
        if isinstance(name := data.get("name"), str):  # of a variable, as pods have them
            yield from _named((*path, "value"), name, data.get("value"), is_variable=True)
        for key, value in data.items():
            yield from _formed(path, str(key))
            yield from leaks(value, (*path, key))
    elif isinstance(data, list):
        for index, (flag, value) in enumerate(pairwise(data), start=1):
            if str(flag).startswith("-") and not _NO_VALUE.fullmatch(str(value)):
                yield from _named((*path, index), str(flag), value)
        for index, value in enumerate(data):
            yield from leaks(value, (*path, index))
    elif data is not None:
        yield from _in_value(path, data)


def _in_value(path: tuple[str | int, ...], value: Any) -> Iterator[Leak]:
    text = str(value)
    yield from _formed(path, text)
    match path:
        case ("env", "secrets", str(name)):  # where {file: PATH} belongs
            yield Leak(path, f"the value of {name}", text, name)
        case ("env", "secrets", str(name), "env") if _NO_NAME.fullmatch(text):
            yield Leak(path, f"the value of {name}, not the name of a variable", text)
        case ("env", "variables", str(name)):
            yield from _named(path, name, value, is_variable=True)
        case (*_, str(name)):
            yield from _named(path, name, value)


def _formed(path: tuple[str | int, ...], text: str) -> Iterator[Leak]:
    for what, start, end, name in find_secrets(text):
        yield Leak(path, what, text[start:end], name)


def _named(
    path: tuple[str | int, ...], name: str, value: Any, *, is_variable: bool | None = None
) -> Iterator[Leak]:
    text = "" if isinstance(value, bool | dict | list | None) else str(value)
    if is_secret(name, text, is_variable=is_variable):
        yield Leak(path, f"the value of {name}", text, name)

"""What a job draws of each of its corpora, and how often over: as far as file sizes say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.plan.config import DataSection
from elastic_trainer.plan.mix import shares_of
from elastic_trainer.storage.examine import count_tokens
from launcher.plan.summary import short
from launcher.render.local import resolve
from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a job draws of a corpus by its end."""

    name: str
    """Of a mix; else the path as written."""
    share: float
    """Of the samples."""
    tokens: int
    """Drawn, to a sample."""
    has: int | None
    """Tokens of the corpus; None: not known before it is encoded, or not to be seen here."""
    passes: float | None
    """Over its windows; above 1 they are repeated."""


def drawn(spec: JobSpec) -> list[Drawn]:
    """Return what a job draws of each corpus; of a script nothing is known."""
    if spec.command is not None:
        return []
    data, train, found = spec.data, spec.train, []
    names = [str(data.path)] if data.mix is None else list(data.mix)
    shares = shares_of([one.weight for one in (data.mix or {}).values()] or [1])
    for name, (key, one), share in zip(names, data.corpora.items(), shares, strict=True):
        samples = train.steps * train.global_batch * share / sum(shares)
        has = _tokens_of(Path(resolve(spec.data_paths[key], spec.folder)), one)
        windows = 0 if has is None else (has - 1) // train.seq_len
        found.append(
            Drawn(
                name=name,
                share=share / sum(shares),
                tokens=round(samples) * train.seq_len,
                has=has,
                passes=samples / windows if windows > 0 else None,
            )
        )
    return found


def _tokens_of(path: Path, section: DataSection) -> int | None:
    try:
        return count_tokens(path, section.format, section.tokenizer)
    except (OSError, IndexError):  # it is not here; whether it must be is asked elsewhere
        return None


def drawn_lines(found: Sequence[Drawn]) -> list[str]:
    """Return a line a corpus; none of a single one of which nothing is known."""
    if len(found) == 1 and found[0].passes is None:
        return []
    return [f"{'data' if each is found[0] else '':8} {_line(each)}" for each in found]


def _line(each: Drawn) -> str:
    share = f", {each.share:.4g} of the samples" if each.share < 1 else ""
    text = f"{each.name}{share}: {short(each.tokens)} tokens"
    if each.has is None or each.passes is None:
        return f"{text}, of how many is known once it is encoded"
    repeated = ": repeated" if each.passes > 1 else ""
    return f"{text} of {short(each.has)}, {each.passes:.3g} passes{repeated}"


def drawn_dicts(found: Sequence[Drawn]) -> list[dict[str, Any]]:
    """Return the same for `--json`."""
    return [dataclasses.asdict(each) for each in found]

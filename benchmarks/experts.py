"""The experts of a layer: one product of all their rows, beside other ways to multiply them.

    python benchmarks/experts.py [--out FILE]

Processor time of forward and backward, two experts a token, one thread: the least of some
rounds. `modules`: one feed-forward after the other; `trainer`: ours;
`grouped`: torch's grouped product of copies side by side, as on GPUs; `padded`: as many rows each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from common import OUT, machine, say, table, write_out
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model import grouped

Multiply = Callable[[Tensor, Sequence[Tensor]], Tensor]
ROUNDS = 4


def _swiglu(multiply: Multiply, x: Tensor, w1: list, w2: list, w3: list) -> Tensor:
    return multiply(F.silu(multiply(x, w1)) * multiply(x, w3), w2)


def _copied(ends: Tensor) -> Multiply:
    return lambda x, w: F.grouped_mm(x, torch.stack(tuple(w)).transpose(1, 2), offs=ends.int())


def _ways(x: Tensor, counts: list[int], ws: tuple[list, list, list]) -> dict[str, Callable]:
    ends = torch.tensor(counts).cumsum(0)

    def modules() -> Tensor:
        parts = zip(x.split(counts), *ws, strict=True)
        return torch.cat([_swiglu(F.linear, *each) for each in parts])

    def padded() -> Tensor:
        rows = torch.nn.utils.rnn.pad_sequence(x.split(counts), batch_first=True)
        out = _swiglu(lambda p, w: p @ torch.stack(tuple(w)).transpose(1, 2), rows, *ws)
        return out[torch.arange(rows.shape[1]) < torch.tensor(counts)[:, None]]

    return {
        "modules": modules,
        "trainer": lambda: _swiglu(lambda p, w: grouped.grouped_linear(p, w, ends), x, *ws),
        "grouped": lambda: _swiglu(_copied(ends), x, *ws),
        "padded": padded,
    }


def measure(dtype: torch.dtype, experts: int, dim: int, tokens: int) -> dict[str, float]:
    """Return way -> milliseconds."""
    chosen = torch.randint(0, experts, (2 * tokens,))
    x = torch.randn(2 * tokens, dim, dtype=dtype, requires_grad=True)
    sizes = ((2 * dim, dim), (dim, 2 * dim), (2 * dim, dim))
    w1, w2, w3 = (
        [(0.02 * torch.randn(size)).to(dtype).requires_grad_() for _ in range(experts)]
        for size in sizes
    )
    ways = _ways(x, chosen.bincount(minlength=experts).tolist(), (w1, w2, w3))
    best = dict.fromkeys(ways, float("inf"))
    for name, way in ways.items():  # one by one: each leaves malloc other holes
        for _ in range(ROUNDS):
            for param in (x, *w1, *w2, *w3):
                param.grad = None
            begin = time.process_time()
            way().backward(torch.ones_like(x))
            best[name] = min(best[name], 1e3 * (time.process_time() - begin))
    return best


@click.command(help=__doc__.split("\n")[0])
@OUT
def main(out: Path | None) -> None:
    """Print the table and a JSON line."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    say(machine())
    found = {
        (str(dtype).removeprefix("torch."), experts, dim, tokens): measure(
            dtype, experts, dim, tokens
        )
        for dtype in (torch.float32, torch.bfloat16)
        for experts in (8, 64, 128)
        for dim in (32, 256)
        for tokens in (512, 4096)
    }
    ways = next(iter(found.values()))
    rows = [[*case, *(round(each[way], 1) for way in ways)] for case, each in found.items()]
    header = ["dtype", "experts", "width", "tokens", *ways]
    say(table(header, rows))
    write_out(json.dumps({"header": header, "rows": rows}), out)


if __name__ == "__main__":
    main()

"""The decoder of all families, and how a job's own is found. Knows no layouts or checkpoints.

docs/models.md has what a subclass may replace, and why.

Shapes: B sequences, T tokens, D width, H heads, K KV heads, E head size, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import importlib
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.plan.models import LayeredShape, ModelShape

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


class ModelError(Exception):
    """A job's own decoder cannot be used; a restart cannot help."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"{code} {message}")


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Return the E/2 angular frequencies, scaled for a longer context as the shape says.

    Source: RoFormer (arXiv 2104.09864); linear scaling divides all by the factor. The scaling
    published with Llama 3.1 stretches wavelengths beyond the old context by the factor, leaves
    short ones alone and interpolates those between; YaRN (arXiv 2309.00071, section 3.2) the same,
    but by the number of turns in the old context and along the dimensions.
    """
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    frequencies = shape.rope_theta**-exponents
    if shape.rope_scaling_factor == 1.0:
        return frequencies
    scaled = frequencies / shape.rope_scaling_factor
    if shape.rope_scaling == "linear":
        return scaled
    if shape.rope_scaling == "yarn":
        return torch.lerp(frequencies, scaled, _yarn_ramp(shape))
    wavelengths = 2 * math.pi / frequencies
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    smooth = (shape.rope_original_context / wavelengths - low) / (high - low)
    return torch.lerp(scaled, frequencies, smooth.clamp(0.0, 1.0))


def _yarn_ramp(shape: ModelShape) -> Tensor:
    """Return how much each frequency is stretched, from 0 to 1, as transformers' YaRN does."""
    size = shape.head_size
    # Dimensions that turn `beta` times in the old context.
    low, high = (
        size
        * math.log(shape.rope_original_context / (beta * 2 * math.pi))
        / (2 * math.log(shape.rope_theta))
        for beta in (shape.rope_beta_fast, shape.rope_beta_slow)
    )
    if shape.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    dimensions = torch.arange(size // 2, dtype=torch.float64)
    return ((dimensions - low) / (high - low)).clamp(0.0, 1.0)


def rope_table(shape: ModelShape, positions: Tensor, device: torch.device | str) -> Tensor:
    """Return cosines and sines at `positions` (T,) of each of the shape's R ropes.

    YaRN multiplies both by its attention factor. Shape (2 R, T, E/2), fp32.
    """
    tables = []
    for each in shape.ropes:
        angles = torch.outer(positions.to(torch.float64), rope_frequencies(each))
        tables += [table * each.rope_magnitude for table in (angles.cos(), angles.sin())]
    return torch.stack(tables).float().to(device)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x (B, H, T, E) by `rope` (2, T, E/2); halves, as Hugging Face Llama does."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope[0], rope[1]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.type_as(x)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Map q (B, H, T, E), the last T positions of k and v (B, K, S, E), to (B, H, T, E).

    A position sees itself and those before it, or the last `window` of them, in its own document.
    What torch's `causal_lower_right` does without a window, which cannot be made under activation
    checkpointing: flash's causal mask ends at the lower right corner.

    Args:
        q: queries.
        k: keys.
        v: values.
        window: position i sees j with i - window < j <= i, as transformers'
            sliding_window_causal_mask_function has it; None: all up to i.
        scale: of the scores; None: 1 / sqrt(E).
        documents: where the document of each query begins, as a position of `k`, (B, T) int64;
            None: each sequence is one.
    """
    if window is not None and (unseen := k.shape[2] - q.shape[2] - window + 1) > 0:  # by any query
        k, v = k[:, :, unseen:], v[:, :, unseen:]
        documents = None if documents is None else documents - unseen
    num_queries, num_keys = q.shape[2], k.shape[2]
    window = None if window is None or window >= num_keys else window
    gqa = q.shape[1] != k.shape[1]
    if documents is None and window is None and num_queries == num_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    if documents is None and q.is_cuda and q.dtype in _FLASH_DTYPES and q.shape[-1] % 8 == 0:
        return _flash(q, k, v, window, scale)
    mask = causal_mask(num_queries, num_keys, q.device, window=window, documents=documents)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None) -> Tensor:
    if window is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        out: Tensor = flash(q, k, v, is_causal=True, scale=scale)[0]
        return out
    out = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  the other one has no window
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(None, None, q.shape[2], k.shape[2], 0.0, True, False),
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return out.transpose(1, 2)


def causal_mask(
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Return which keys each query sees, see `attend`: (B or 1, 1, T, S) bool."""
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    mask = (keys <= queries)[None]
    if window is not None:
        mask = mask & (keys > queries - window)
    if documents is not None:
        mask = mask & (keys >= documents[..., None])
    return mask.unsqueeze(1)


class CausalAttention(nn.Module):
    """Softmax attention over the whole sequence, see `attend`."""

    def __init__(self, window: int | None = None, scale: float | None = None) -> None:
        super().__init__()
        self.window, self.scale = window, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map q (B, H, T, E) and k, v (B, K, T, E) to (B, H, T, E); `documents` as of `Decoder`."""
        return attend(q, k, v, window=self.window, scale=self.scale, documents=documents)


class Attention(nn.Module):
    """Causal self-attention with grouped KV heads (arXiv 2305.13245).

    Args:
        shape: of the model.
        bias: of the projections to queries, keys and values.
        output_bias: of the last projection.
        qk_norm: normalise each head's queries and keys before they are rotated.
        window: tokens a position sees, itself included; None: all before it.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size = shape.head_size
        q_dim, kv_dim = shape.num_heads * self.head_size, shape.num_kv_heads * self.head_size
        self.wq = nn.Linear(shape.dim, q_dim, bias=bias)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=bias)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=bias)
        self.wo = nn.Linear(q_dim, shape.dim, bias=output_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_size, eps=shape.norm_eps) if qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.core = CausalAttention(window, shape.attention_scale)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q, k, v = self.project(x)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        y: Tensor = self.wo(self.core(q, k, v, documents).transpose(1, 2).flatten(2))
        return y

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, D) to queries (B, H, T, E), and keys and values (B, K, T, E)."""
        q, k, v = (self.heads(w(x)) for w in (self.wq, self.wk, self.wv))
        return self.q_norm(q), self.k_norm(k), v

    def heads(self, x: Tensor) -> Tensor:
        """Map a projection (B, T, H E) to (B, H, T, E)."""
        # Head counts come from the tensors, so that a sharded projection works as it is.
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(
            shape,
            bias=shape.attention_bias,
            output_bias=shape.output_bias,
            qk_norm=shape.qk_norm,
            window=shape.sliding_window,
        )
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), rope, documents=documents)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class CausalModel(nn.Module, abc.ABC):
    """What the engine and `parallel/` ask of a model, beside its `forward`.

    `forward` maps tokens (B, T) int64, what `positions` returned, and `documents` to logits
    (B, T, V); see `Decoder.forward`.
    """

    shape: ModelShape
    has_head: bool
    """Whether `forward` returns logits: not that of an earlier stage of a pipeline."""
    whole_logits: ClassVar[bool] = False
    """Whether logits are whole on every rank of tp: else each has its part of the vocabulary."""

    @abc.abstractmethod
    def blocks(self) -> dict[str, nn.Module]:
        """Return by their name in the model those modules that are wrapped each by itself."""

    @abc.abstractmethod
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules around the blocks that are gathered together: at first, and at last.

        What is in no block and neither end is gathered for the whole of a forward and backward.
        """

    @abc.abstractmethod
    def allocate(self, device: torch.device) -> None:
        """Give a model on the meta device memory; values of parameters come later."""

    @abc.abstractmethod
    def tie(self) -> None:
        """Make one parameter again of those that `allocate` has separated."""

    @abc.abstractmethod
    def positions(self, positions: Tensor, device: torch.device) -> Tensor:
        """Return what `forward` takes for tokens at `positions` (T,)."""

    @abc.abstractmethod
    def initial_values(self, name: str, size: torch.Size, rows: range, seed: int) -> Tensor:
        """Return rows of the initial value of parameter `name`, see `initial_rows`."""


class Decoder(CausalModel):
    """Tokens (B, T) to logits (B, T, V). Subclasses replace its parts, not `forward`."""

    block: ClassVar[type[nn.Module]] = Block
    """Made with the shape, its window the layer's, once a layer; maps (B, T, D) to (B, T, D)."""
    tensor_plan: Mapping[str, Any] = MappingProxyType(
        {
            "attention_norm": "sequence",
            "attention": "whole",
            "attention.wq": "columns",
            "attention.wk": "columns",
            "attention.wv": "columns",
            "attention.q_norm": "heads",
            "attention.k_norm": "heads",
            "attention.wo": "rows",
            "ffn_norm": "sequence",
            "ffn": "whole",
            "ffn.w1": "columns",
            "ffn.w3": "columns",
            "ffn.w2": "rows",
        }
    )
    """Module of a block -> how it is cut over tp: a word of `parallel/tensor.py`, or a
    ParallelStyle of torch. Modules that a block does not have, and identities, are passed over."""
    residual: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "ffn.w2.weight")
    """Matrices of a block whose products join the residual stream."""
    hf_names: Mapping[str, str] = MappingProxyType(
        {
            "attention_norm": "input_layernorm",
            "attention.wq": "self_attn.q_proj",
            "attention.wk": "self_attn.k_proj",
            "attention.wv": "self_attn.v_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "attention.wo": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn.w1": "mlp.gate_proj",
            "ffn.w3": "mlp.up_proj",
            "ffn.w2": "mlp.down_proj",
        }
    )
    """Module of a block -> Hugging Face's; their parameters have the same names, sizes and rows."""
    hf_config: ClassVar[Mapping[str, Any] | None] = None
    """Of a job's own decoder: what config.json says beside the dimensions; None: no exports."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleDict(
            {str(i): self.block(_of_layer(shape, i)) for i in range(shape.num_layers)}
        )
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) to logits (B, T, V).

        Args:
            tokens: int64.
            rope: from `rope_table`; a block takes its own (2, T, E/2).
            documents: where in its sequence the document of each position begins, (B, T) int64;
                none attends to another. None: each sequence is one document.
        """
        x = self.embedding(tokens)
        for name, layer in self.layers.items():
            first = 2 * self.shape.layer_rope(int(name))
            x = layer(x, rope[first : first + 2], documents)
        y: Tensor = self.head(self.norm(x))
        return y

    @property
    def has_head(self) -> bool:  # type: ignore[override]
        """Not of a stage whose head is another's."""
        return not isinstance(self.head, nn.Identity)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers."""
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return embedding, and norm with head; tied tables are together."""
        last = [self.norm, self.head] if self.has_head else []
        if isinstance(self.embedding, nn.Identity):
            return [], last
        if last and self.shape.tie_embeddings:
            return [], [self.embedding, *last]
        return [self.embedding], last

    def allocate(self, device: torch.device) -> None:
        """Give all parameters memory; there are no buffers."""
        self.to_empty(device=device)

    def tie(self) -> None:
        """Make head and embedding one, if they are tied."""
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def positions(self, positions: Tensor, device: torch.device) -> Tensor:
        """Return cosines and sines, see `rope_table`."""
        return rope_table(self.shape, positions, device)

    def initial_values(self, name: str, size: torch.Size, rows: range, seed: int) -> Tensor:
        """Return rows of the initial value of parameter `name`, as `initial` says."""
        mean, deviation = self.initial(name)
        return initial_rows(name, size, rows, seed, mean=mean, deviation=deviation)

    def initial(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of the initial values of parameter `name`.

        Norms are one, biases zero. The deviation of matrices is 0.02, divided by sqrt(2 L) where a
        branch joins the residual stream (GPT-2's scheme).
        """
        if "norm" in name:
            return 1.0, 0.0
        if name.endswith("bias"):
            return 0.0, 0.0
        joins = name.endswith(self.residual)
        return 0.0, 0.02 / (math.sqrt(2 * self.shape.num_layers) if joins else 1.0)


def _of_layer(shape: ModelShape, layer: int) -> ModelShape:
    """Return `shape` with the window of layer `layer` for that of all."""
    if isinstance(shape, LayeredShape) and shape.layer_window(layer) is None:
        return dataclasses.replace(shape, sliding_window=None)
    return shape


_PARTS = ("embedding", "layers", "norm", "head")


def build(shape: ModelShape, folder: str | None = None) -> Decoder:
    """Return the decoder of `shape` on the meta device.

    Args:
        shape: of the model.
        folder: where a job's own class is imported from; None: from where Python looks anyway.

    Raises:
        ModelError: HF330 the class cannot be imported; HF331 it is not a decoder as the trainer
            needs it; HF332 it has not as many parameters as were planned with.
    """
    cls = _import(shape.decoder, folder)
    try:
        with torch.device("meta"):
            model = cls(shape)
        layers = list(model.layers)
    except Exception as error:
        raise ModelError(
            "HF331",
            f"{shape.decoder} cannot be made of these dimensions and options "
            f"({type(error).__name__}: {error}): fix the class, or model in the job file",
        ) from error
    parts = {
        name.partition(".")[0] for name, _ in (*model.named_children(), *model.named_parameters())
    }
    if parts != set(_PARTS) or layers != [str(i) for i in range(shape.num_layers)]:
        raise ModelError(
            "HF331",
            f"{shape.decoder} has the parts {', '.join(sorted(parts))} with {len(layers)} layers; "
            f"a decoder has {', '.join(_PARTS)}, layers 0 to {shape.num_layers - 1}, or a "
            "pipeline could not cut it",
        )
    count = sum(param.numel() for param in model.parameters())
    if abs(count - shape.num_params()) > 0.01 * count:
        raise ModelError(
            "HF332",
            f"{shape.decoder} has {count:,} parameters; bytes were planned with "
            f"{shape.num_params():,}: set model.params: {count}",
        )
    return model


def _import(path: str, folder: str | None) -> type[Decoder]:
    """Return the class at `module:Class`.

    As where code is frozen, the folder and its `src` are at the end of sys.path, so
    that no module of the job shadows a library.
    """
    for entry in (folder, f"{folder}/src") if folder else ():
        if entry not in sys.path:
            sys.path.append(entry)
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ModelError(
            "HF330",
            f"{path} cannot be imported on this node ({type(error).__name__}: {error}); it is "
            f"looked for in {folder or 'the environment'}: fix it there, or model.plugin",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Decoder)):
        raise ModelError("HF331", f"{path} is not a subclass of holdfast.models.Decoder")
    if found.forward is not Decoder.forward:
        raise ModelError(
            "HF331",
            f"{path} has a forward of its own, which a stage of a pipeline would not run: put what "
            "it does into the block, or into a subclass of nn.Embedding or nn.Linear",
        )
    return found


INITIAL_ROWS = 64
"""Rows of a tensor that share one random generator; any layout can make any of them."""


def initial_rows(
    name: str, size: torch.Size, rows: range, seed: int, *, mean: float, deviation: float
) -> Tensor:
    """Return rows (of the first dim) of the initial value of parameter `name`, fp32, CPU.

    A function of (seed, name, row) alone, so every layout starts from the same values,
    and each rank makes little more than it keeps.

    Args:
        name: as in `Decoder.named_parameters()`.
        size: of the whole tensor.
        rows: which rows, step 1.
        seed: of the run.
        mean: of the values.
        deviation: of normal values; 0: all are the mean.
    """
    if deviation == 0.0:
        return torch.full((len(rows), *size[1:]), mean)
    blocks = []
    for block in range(rows.start // INITIAL_ROWS, -(-rows.stop // INITIAL_ROWS)):
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        begin = block * INITIAL_ROWS
        height = min(INITIAL_ROWS, size[0] - begin)
        values = torch.empty(height, *size[1:]).normal_(mean, deviation, generator=generator)
        blocks.append(values[max(0, rows.start - begin) : rows.stop - begin])
    return torch.cat(blocks) if blocks else torch.empty(0, *size[1:])

"""A Llama-style decoder of plain torch operators over a paged KV cache.

RMSNorm, rotary positions, grouped-query attention over a block table, SwiGLU, greedy sampling. Its
weights are random and follow from a seed, so the same model is made on any device. It is meant for
tests: it gathers every key it attends to and is not fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

__all__ = ["CapturedStep", "DecoderConfig", "PagedDecoder", "Step", "StepInputs"]

KVCache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder.

    Attributes:
        layers: number of layers.
        heads: query heads of a layer.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: elements of a head; even.
        vocabulary: number of tokens.
        block_tokens: tokens in a block of the KV cache.
        max_blocks: blocks of the longest sequence.
        seed: of the weights.
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 128
    block_tokens: int = 16
    max_blocks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1 and field.name != "seed":
                raise ValueError(f"{field.name}={value}: at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd")

    @property
    def hidden(self) -> int:
        """Elements of a token's state."""
        return self.heads * self.head_dim

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_blocks * self.block_tokens


class StepInputs(NamedTuple):
    """One row for each token that a step computes; int64 tensors on the decoder's device.

    The rows of a step may belong to one sequence (prefill), to many (decode) or both. The keys and
    values of all rows are stored before any row attends.

    Attributes:
        tokens: ``[rows]``.
        positions: ``[rows]``, of the token in its sequence.
        blocks: ``[rows]``, the block that takes the token's key and value.
        offsets: ``[rows]``, the place inside that block.
        block_tables: ``[rows, max_blocks]``, the blocks of the row's sequence in order, padded with
            any valid block.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    block_tables: torch.Tensor


# Takes the fields of StepInputs; returns logits [rows, vocabulary] and the next tokens [rows].
Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PagedDecoder(nn.Module):
    """The model with its KV cache: for each layer a pair ``[blocks, block_tokens, heads, dim]``.

    Calling it with the fields of :class:`StepInputs` stores the keys and values of the rows in the
    cache and returns the logits ``[rows, vocabulary]`` (float32) and the greedy next tokens
    ``[rows]`` (int64). Not thread-safe: the cache is changed.

    Args:
        config: the sizes.
        num_blocks: blocks of the cache, zeroed at first.
        device: where weights and cache are.
        dtype: of both.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    places: torch.Tensor

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        random = torch.Generator().manual_seed(config.seed)
        self.embedding = nn.Embedding(config.vocabulary, config.hidden, device="meta")
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = _RMSNorm(config.hidden)
        self.head = _linear(config.hidden, config.vocabulary)
        self._fill_weights(random, device, dtype)
        angles = _angles(config)
        self.register_buffer("cosines", angles.cos().to(device, dtype), persistent=False)
        self.register_buffer("sines", angles.sin().to(device, dtype), persistent=False)
        places = torch.arange(config.max_tokens)
        self.register_buffer("places", places.to(device), persistent=False)
        shape = (num_blocks, config.block_tokens, config.kv_heads, config.head_dim)
        for layer in self.layers:
            for name in ("keys", "values"):
                cache = torch.zeros(shape, dtype=dtype, device=device)
                layer.register_buffer(name, cache, persistent=False)

    @property
    def kv_caches(self) -> dict[str, KVCache]:
        """The cache by layer name, as a model runner hands it over."""
        return {
            f"layers.{index}": (layer.keys, layer.values)
            for index, layer in enumerate(self._layers())
        }

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        block_tables: torch.Tensor,
        before_layer: Callable[[int], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step; see the class. ``before_layer`` is called with each layer's number."""
        rotation = (self.cosines[positions][:, None], self.sines[positions][:, None])
        ahead = self.places[None] > positions[:, None]
        state = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(index)
            state = layer(state, rotation, ahead, blocks, offsets, block_tables)
        logits = self.head(self.norm(state)).float()
        return logits, logits.argmax(-1)

    def _layers(self) -> list[_Layer]:
        return [layer for layer in self.layers if isinstance(layer, _Layer)]

    def _fill_weights(
        self, random: torch.Generator, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        # Made on the CPU whatever the device, since only there a seed means the same everywhere.
        # With a spread of one over the root of the inputs, queries and keys are large enough for
        # attention to choose: what the cache holds decides the next token.
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.dim() == 1:
                    values = 1 + torch.randn(weight.shape, generator=random) / 10
                else:
                    values = torch.randn(weight.shape, generator=random)
                    if not isinstance(module, nn.Embedding):
                        values /= math.sqrt(weight.shape[1])
                made = nn.Parameter(values.to(device, dtype), requires_grad=False)
                setattr(module, name, made)


class _Layer(nn.Module):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden, 2 * config.hidden
        self.config = config
        self.attention_norm = _RMSNorm(hidden)
        self.query = _linear(hidden, config.heads * config.head_dim)
        self.key = _linear(hidden, config.kv_heads * config.head_dim)
        self.value = _linear(hidden, config.kv_heads * config.head_dim)
        self.output = _linear(config.heads * config.head_dim, hidden)
        self.mlp_norm = _RMSNorm(hidden)
        self.gate = _linear(hidden, inner)
        self.up = _linear(hidden, inner)
        self.down = _linear(inner, hidden)

    def forward(
        self,
        state: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        ahead: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        x = self.attention_norm(state)
        query = _rotate(self.query(x).view(-1, config.heads, config.head_dim), rotation)
        key = _rotate(self.key(x).view(-1, config.kv_heads, config.head_dim), rotation)
        value = self.value(x).view(-1, config.kv_heads, config.head_dim)
        self.keys.index_put_((blocks, offsets), key)
        self.values.index_put_((blocks, offsets), value)
        attended = self._attend(query, ahead, block_tables)
        state = state + self.output(attended)
        x = self.mlp_norm(state)
        mixed: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return state + mixed

    def _attend(
        self, query: torch.Tensor, ahead: torch.Tensor, block_tables: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        rows = query.shape[0]
        seen = (rows, config.max_tokens, config.kv_heads, config.head_dim)
        # [rows, kv_heads, ...]: the query heads of a group share a key and value head.
        keys = self.keys[block_tables].view(seen).transpose(1, 2)
        values = self.values[block_tables].view(seen).transpose(1, 2)
        grouped = query.view(rows, config.kv_heads, -1, config.head_dim)
        scores = grouped @ keys.transpose(-1, -2) / math.sqrt(config.head_dim)
        scores = scores.masked_fill(ahead[:, None, None], float("-inf"))
        return (scores.softmax(-1) @ values).reshape(rows, config.heads * config.head_dim)


class _RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * self.weight


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def _angles(config: DecoderConfig) -> torch.Tensor:
    steps = torch.arange(0, config.head_dim, 2) / config.head_dim
    return torch.arange(config.max_tokens)[:, None] / 10000.0 ** steps[None]


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class CapturedStep:
    """A step as a ``torch.npu.NPUGraph``: captured at the first call, replayed at every call.

    All calls must have as many rows. The returned tensors are overwritten by the next call.

    Args:
        step: what to capture, a :class:`PagedDecoder` or anything with its arguments.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: Any = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step.

        Raises:
            ValueError: an input has another shape than at the first call.
        """
        if self._outputs is None:
            self._outputs = self._capture(inputs)
        for place, value in zip(self._inputs, inputs, strict=True):
            if place.shape != value.shape:
                raise ValueError(
                    f"captured for a shape of {tuple(place.shape)}, called with "
                    f"{tuple(value.shape)}"
                )
            place.copy_(value)
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        npu = torch.npu  # type: ignore[attr-defined]
        self._inputs = [value.clone() for value in inputs]
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph):
            return self._step(*self._inputs)

"""The decoder with the swaps inside its decode step, so that they become part of its graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from npu_kv_ops.testing.decoder import PagedDecoder, StepInputs
from npu_kv_ops.testing.server import BlockSwap

__all__ = ["StepSwap", "SwappingDecoder"]


class SwappingDecoder(nn.Module):
    """A decode step that first stores blocks to the host and loads others from there.

    Called with the inputs of a step and four int64 id tensors ``[pairs]`` on the decoder's device:
    device blocks to store, host blocks that take them, host blocks to load, device blocks that
    take them. -1 pads a pair.

    Args:
        decoder: the model.
        swap: the owner of the two pools.
        per_layer: swap the blocks of a layer just before it computes, instead of those of all
            layers at the start.
    """

    def __init__(self, decoder: PagedDecoder, swap: BlockSwap, *, per_layer: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.per_layer = per_layer
        # Plain lists of tensors: compilers take what a module holds as it is. And the caches
        # themselves, not their views as bytes: compilers refuse two dtypes of one memory.
        self.device = [tensor for pair in decoder.kv_caches.values() for tensor in pair]
        self.host = [
            mirror.view(cache.dtype).view(-1, *cache.shape[1:])
            for mirror, cache in zip(swap.host, self.device, strict=True)
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step; see the class."""
        step, (stored, store_to, loaded, load_to) = inputs[:-4], inputs[-4:]
        swap = torch.ops.npu_kv.swap_blocks_batch

        def swap_layers(first: int, count: int) -> None:
            device = self.device[2 * first : 2 * (first + count)]  # keys and values
            host = self.host[2 * first : 2 * (first + count)]
            swap(device, host, stored, store_to)
            swap(host, device, loaded, load_to)

        if not self.per_layer:
            swap_layers(0, len(self.device) // 2)
            return self.decoder.forward(*StepInputs(*step))
        return self.decoder.forward(
            *StepInputs(*step), before_layer=lambda index: swap_layers(index, 1)
        )


class StepSwap(BlockSwap):
    """Collects the moves of blocks and hands them to the next step, as ids.

    Args:
        decoder: the owner of the device pool.
        host_blocks: size of the host pool.
        pairs: length of the id tensors.
        zero: zero host blocks before they are loaded, as a control.
    """

    def __init__(
        self, decoder: PagedDecoder, host_blocks: int, *, pairs: int, zero: bool = False
    ) -> None:
        super().__init__(decoder, host_blocks)
        self.pairs = pairs
        self.blocks_in_steps = 0
        self._zero = zero
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._where = self.device[0].device

    def out(self, blocks: Sequence[int]) -> list[int]:
        """Note that device blocks are to be stored; returns the host blocks that will take them."""
        taken = self._take(len(blocks))
        self._stores += zip(blocks, taken)
        self.blocks_out += len(blocks)
        return taken

    def back(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Note that host blocks are to be loaded. They become free when that is under way."""
        self._loads += zip(host_blocks, blocks)
        self.blocks_in += len(blocks)

    def ids(self) -> list[torch.Tensor]:
        """Return what the next step has to swap, for :class:`SwappingDecoder`."""
        if max(len(self._stores), len(self._loads)) > self.pairs:
            self.flush()
        self.blocks_in_steps += len(self._loads)
        columns = [*self._columns(self._stores), *self._columns(self._loads)]
        self._begin()
        padded = [column + [-1] * (self.pairs - len(column)) for column in columns]
        return [torch.tensor(column).to(self._where) for column in padded]

    def flush(self) -> None:
        """Swap what is waiting now."""
        stores, loads = self._columns(self._stores), self._columns(self._loads)
        self._begin()
        if stores[0]:
            super()._copy(self.device, self.host, *stores)
        if loads[0]:
            super()._copy(self.host, self.device, *loads)

    def _begin(self) -> None:
        # Not before: a store of the same step must not take a block that is still to be loaded.
        self.free += [host for host, _ in self._loads]
        if self._zero and self._loads:
            if self._where.type == "npu":
                torch.npu.synchronize()  # type: ignore[attr-defined]
            fresh = {host for _, host in self._stores}
            for tensor in self.host:
                tensor[[host for host, _ in self._loads if host not in fresh]] = 0
        self._stores, self._loads = [], []

    @staticmethod
    def _columns(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        return [[pair[side] for pair in pairs] for side in (0, 1)]

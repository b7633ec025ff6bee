"""A model that is nothing but its traffic: layers that load blocks, compute, and store blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["LayeredModel"]


class LayeredModel(nn.Module):
    """A layer after the other: load into its pool, compute with it, write into it, store from it.

    Called with a vector ``[payload]`` and four int64 id tensors ``[pairs]`` on the device: host
    blocks to load, device blocks that take them, device blocks to store, host blocks that take
    them. Returns the vector that the last layer has made. A layer that loads computes with block 1
    of its pool, one that stores writes block 0: load into the former and store the latter to have
    the result depend on every copy.

    Args:
        kinds: ``"load"``, ``"store"`` or both.
        layers: number of layers, each with a pool of its own.
        blocks: blocks of a pool, here and on the host.
        payload: float32 elements of a block.
        device: of the pools.
        halves: 1, or 2: keys and values side by side in each block, swapped by a call each.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        layers: int,
        blocks: int,
        payload: int,
        device: str,
        halves: int = 1,
    ) -> None:
        super().__init__()
        self.halves = halves
        self.loads, self.stores = "load" in kinds, "store" in kinds
        generator = torch.Generator().manual_seed(0)

        shape = (blocks, payload) if halves == 1 else (blocks, halves, payload)

        def tensors_of(pool: torch.Tensor) -> Sequence[torch.Tensor]:
            return [pool] if halves == 1 else pool.unbind(1)

        self.device_pools: list[torch.Tensor] = []
        self.host_pools: list[torch.Tensor] = []
        for _ in range(layers):
            here, there = (torch.rand(shape, generator=generator) + 0.5 for _ in range(2))
            self.device_pools += tensors_of(here.to(device))
            self.host_pools += tensors_of(there if device == "cpu" else there.pin_memory())
        self.written = torch.zeros(1, dtype=torch.int64, device=device)

    def forward(
        self,
        x: torch.Tensor,
        loaded: torch.Tensor,
        load_to: torch.Tensor,
        stored: torch.Tensor,
        store_to: torch.Tensor,
    ) -> torch.Tensor:
        """Compute; see the class."""
        swap = torch.ops.npu_kv.swap_blocks_batch
        for first in range(0, len(self.device_pools), self.halves):
            device = self.device_pools[first : first + self.halves]
            host = self.host_pools[first : first + self.halves]
            for here, there in zip(device, host, strict=True):
                if self.loads:
                    swap([there], [here], loaded, load_to)
            keys, values = device[0], device[-1]
            x = x * keys[1] if self.halves == 1 else torch.addcmul(keys[1], x, values[1])
            for here, there in zip(device, host, strict=True):
                if self.stores:
                    here.index_put_((self.written,), x.unsqueeze(0))
                    swap([here], [there], stored, store_to)
        return x

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
    """

    def __init__(
        self, kinds: Sequence[str], *, layers: int, blocks: int, payload: int, device: str
    ) -> None:
        super().__init__()
        self.loads, self.stores = "load" in kinds, "store" in kinds
        generator = torch.Generator().manual_seed(0)

        def pool() -> torch.Tensor:
            return torch.rand(blocks, payload, generator=generator) + 0.5

        self.device_pools = [pool().to(device) for _ in range(layers)]
        self.host_pools = [pool() for _ in range(layers)]
        if device != "cpu":
            self.host_pools = [each.pin_memory() for each in self.host_pools]
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
        for device, host in zip(self.device_pools, self.host_pools, strict=True):
            if self.loads:
                swap([host], [device], loaded, load_to)
            x = x * device[1]
            if self.stores:
                device.index_put_((self.written,), x.unsqueeze(0))
                swap([device], [host], stored, store_to)
        return x

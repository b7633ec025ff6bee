"""Pools for the tests of the copy backend, with a plain model of what has to be in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from block_reference import make_pool

from npu_kv_ops import NPUDmaCopyBackend, TransferEvent

Events = list[tuple[int, TransferEvent]]
WAIT_S = 60.0


class Pools:
    """A device pool and a host pool, and what jobs that run one after the other leave there."""

    def __init__(
        self,
        device: str = "npu:0",
        *,
        device_blocks: int = 12,
        host_blocks: int = 20,
        tensors: int = 3,
        seed: int = 0,
        pin: bool = True,
        gap: int = 0,
    ) -> None:
        on_npu = device.startswith("npu")

        def side(blocks: int, first: int, gap: int, **where: Any) -> list[torch.Tensor]:
            return [make_pool(blocks, seed=first + t, gap=gap, **where) for t in range(tensors)]

        self.npu = side(device_blocks, seed, gap, device=device)
        self.cpu = side(host_blocks, seed + 1000, 0, pin=pin and on_npu)
        self.npu_model = [t.cpu().clone() for t in self.npu]
        self.cpu_model = [t.clone() for t in self.cpu]

    def apply(self, src: Sequence[int], dst: Sequence[int], is_store: bool) -> None:
        """What one job does, when all before it are done."""
        models = (self.npu_model, self.cpu_model)
        for source, target in zip(*(models if is_store else models[::-1])):
            pairs = [(s, d) for s, d in zip(src, dst) if s >= 0 and d >= 0]
            read = {s: source[s].clone() for s, _ in pairs}
            for s, d in pairs:
                target[d] = read[s]

    def check(self) -> None:
        """Every byte of both pools is what the model says."""
        for name, real, model in (
            ("device", self.npu, self.npu_model),
            ("host", self.cpu, self.cpu_model),
        ):
            for t, (tensor, expected) in enumerate(zip(real, model)):
                got = tensor.cpu().contiguous().view(torch.uint8)
                want = expected.contiguous().view(torch.uint8)
                rows = (got != want).flatten(1).any(1).nonzero().flatten().tolist()
                assert not rows, f"{name} tensor {t}: blocks {rows} differ"


@contextmanager
def backend_on(pools: Pools, **streams: Any) -> Iterator[NPUDmaCopyBackend]:
    """A backend on the pools, shut down at the end; a hang is a failure."""
    backend = NPUDmaCopyBackend()
    backend.init(pools.npu, pools.cpu, **streams)
    try:
        yield backend
    finally:
        backend.shutdown(WAIT_S)


def store(
    backend: NPUDmaCopyBackend, src: Sequence[int], dst: Sequence[int], event: Any = None
) -> TransferEvent:
    return _launch(backend, src, dst, True, event)


def load(
    backend: NPUDmaCopyBackend, src: Sequence[int], dst: Sequence[int], event: Any = None
) -> TransferEvent:
    return _launch(backend, src, dst, False, event)


def _launch(
    backend: NPUDmaCopyBackend, src: Sequence[int], dst: Sequence[int], is_store: bool, event: Any
) -> TransferEvent:
    events: Events = []
    backend.launch_copy(src, dst, is_store, 0, events, event)
    return events[0][1]

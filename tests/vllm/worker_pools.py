"""KV caches in the layouts of vLLM and vLLM-Ascend, and a rank that copies their blocks.

The simulated NPU gives no CPU access to device memory, and few operators for odd strides. So a
cache is a view that is only described; tests write and read whole allocations and apply the
description to a copy on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.worker.utils import allocate_kv_cache

from npu_kv_ops.integrations.vllm import NpuKVOffloadWorker

Cache = torch.Tensor | Sequence[torch.Tensor]


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait for a condition, as an engine waits for transfers: by asking."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


class Memory:
    """Allocations of a device, written and read as a whole."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.buffers: list[torch.Tensor] = []

    def allocate(self, size: int) -> torch.Tensor:
        return self.adopt(torch.empty(size, dtype=torch.int8, device=self.device))

    def adopt(self, raw: torch.Tensor) -> torch.Tensor:
        self.buffers.append(raw)
        return raw

    def fill(self, seed: int) -> list[torch.Tensor]:
        """Random bytes everywhere; returns them."""
        generator = torch.Generator().manual_seed(seed)
        content = [
            torch.randint(-128, 128, b.shape, dtype=torch.int8, generator=generator)
            for b in self.buffers
        ]
        for buffer, values in zip(self.buffers, content, strict=True):
            buffer.copy_(values)
        return content

    def read(self) -> list[torch.Tensor]:
        return [buffer.cpu().clone() for buffer in self.buffers]

    def home(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage().data_ptr()
        return next(
            i for i, b in enumerate(self.buffers) if b.untyped_storage().data_ptr() == storage
        )


def typed(
    raw: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A view of the storage of ``raw`` from byte ``offset``; contiguous, or with the strides."""
    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    empty = torch.empty(0, dtype=dtype, device=raw.device)
    return empty.set_(raw.untyped_storage(), offset // dtype.itemsize, shape, strides)


@dataclass(frozen=True)
class Part:
    """A tensor of a layer, and which slices of which dimension are a manager block."""

    tensor: torch.Tensor
    dim: int = 0
    ratio: int = 1

    def of(self, contents: Sequence[torch.Tensor], memory: Memory, block: int) -> torch.Tensor:
        """The bytes of a block in a copy of the memory."""
        raw = contents[memory.home(self.tensor)]
        t = self.tensor
        offset = t.storage_offset() * t.element_size()
        copy = typed(raw, offset, t.shape, t.dtype, t.stride())
        piece = copy.narrow(self.dim, block * self.ratio, self.ratio).contiguous()
        return piece.flatten().view(torch.uint8)


@dataclass
class Layout:
    """What a model runner registers, and the truth about it."""

    memory: Memory
    caches: dict[str, Cache]
    config: KVCacheConfig
    parts: list[Part]
    regions: int  # copies a block
    block_bytes: int  # of all regions

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks


def config_of(
    num_blocks: int, groups: Sequence[tuple[Sequence[str], Any]], size: int
) -> KVCacheConfig:
    """A config whose placement nobody reads, as vLLM-Ascend's runner places caches itself."""
    listed = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    names = [name for group in listed for name in group.layer_names]
    placement = KVCacheTensor(size=size, layers=names, layer_stride=0, block_stride=0)
    return KVCacheConfig(num_blocks, [placement], listed)


def upstream(
    device: str,
    layout: str,
    groups: Sequence[tuple[Sequence[str], Any]],
    *,
    num_blocks: int,
    regions: int,
    kernel_block_sizes: list[int] | None = None,
) -> Layout:
    """Caches placed and viewed by vLLM's own code."""
    kind = KVCacheLayout[layout]
    specs = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: kind,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=num_blocks,
    )
    vllm_config: Any = SimpleNamespace(
        cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None)
    )
    config = get_kv_cache_config_from_groups(vllm_config, specs, 1 << 30)
    caches = allocate_kv_cache(config, torch.device(device), kind, kernel_block_sizes)
    memory = Memory(device)
    memory.adopt(
        typed(next(iter(caches.values())), 0, (config.kv_cache_tensors[0].size,), torch.int8)
    )
    ratios = {name: len(cache) // num_blocks for name, cache in caches.items()}
    return Layout(
        memory,
        dict(caches),
        config,
        [Part(cache, ratio=ratios[name]) for name, cache in caches.items()],
        regions,
        config.kv_cache_tensors[0].size // num_blocks,
    )


@dataclass
class Rank:
    """A worker, driven step by step as vLLM's model runner does."""

    worker: NpuKVOffloadWorker
    loads: int = 0
    stores: int = 0
    outstanding: dict[int, list[str]] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    failed_stores: set[int] = field(default_factory=set)
    failed_host_blocks: set[int] = field(default_factory=set)
    load_errors: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)

    def step(
        self,
        *,
        load: tuple[Sequence[int], Sequence[int]] | None = None,
        store: tuple[Sequence[int], Sequence[int]] | None = None,
        requests: Iterable[str] = (),
        flush: bool = False,
    ) -> None:
        """One engine step. ``load`` and ``store`` are ``(device ids, host ids)``."""
        meta = SimpleCPUOffloadMetadata(need_flush=flush)
        if load is not None:
            meta.load_event, self.loads = self.loads, self.loads + 1
            meta.load_gpu_blocks, meta.load_cpu_blocks = list(load[0]), list(load[1])
            self.outstanding[meta.load_event] = list(requests) or [f"load-{meta.load_event}"]
        if store is not None:
            meta.store_event, self.stores = self.stores, self.stores + 1
            meta.store_gpu_blocks, meta.store_cpu_blocks = list(store[0]), list(store[1])
        meta.load_event_to_reqs = {event: list(r) for event, r in self.outstanding.items()}
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        self.poll()
        self.worker.clear_connector_metadata()

    def poll(self) -> None:
        worker = self.worker
        sent, received = worker.get_finished(set())
        assert sent is None
        for request in received or ():
            assert request not in self.received, f"{request} was reported twice"
            self.received.add(request)
            for requests in self.outstanding.values():
                if request in requests:
                    requests.remove(request)
        self.outstanding = {event: r for event, r in self.outstanding.items() if r}
        self.load_errors |= worker.take_load_errors()
        self.failed_requests |= worker.take_failed_requests()
        if (meta := worker.build_connector_worker_meta()) is not None:
            for event, count in meta.completed_store_events.items():
                assert count == 1
                assert event not in self.completed, f"store {event} was reported twice"
                self.completed.add(event)
            self.failed_stores |= meta.failed_store_events
            self.failed_host_blocks |= meta.failed_host_blocks

    def poll_all_at_once(self) -> None:
        """One step without transfers, in which everything launched has to be reported."""
        self.step()
        assert len(self.completed) == self.stores
        assert not self.outstanding

    def drain(self) -> None:
        """Empty steps until everything launched has been reported."""

        def done() -> bool:
            self.step()
            return not self.outstanding and len(self.completed) == self.stores

        assert eventually(done), (
            f"loads {self.outstanding}, stores {self.completed} of {self.stores}"
        )

    def store(self, device: Sequence[int], host: Sequence[int]) -> None:
        self.step(store=(device, host))
        self.drain()

    def load(self, host: Sequence[int], device: Sequence[int]) -> None:
        self.step(load=(device, host))
        self.drain()


def rank_on(layout: Layout, *, host_blocks: int) -> Rank:
    """A rank with the caches registered and a host pool of ``host_blocks`` blocks."""
    worker = NpuKVOffloadWorker(None, layout.config, host_blocks * layout.block_bytes)
    worker.register_kv_caches(layout.caches)
    return Rank(worker)

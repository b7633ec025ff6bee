"""Runs requests: every block that moves goes through the operator or the copy backend."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import patterns
from .models import KVModel
from .movers import MOVERS, Backend, Traffic, npu
from .pools import Policy, Step, TwoTierCache
from .sizing import Memory, Sizes, available_host_memory
from .trace import BlockKey, BlockMap, BlockNeed, Request

if TYPE_CHECKING:
    import torch

Verify = Literal["all", "sample", "off"]

_SAMPLED_BLOCKS = 4
_PRIVATE_SERIALS = 1 << 62
_KEPT_MISMATCHES = 20
_PAUSE_SECONDS = 0.05

DEFAULT_AHEAD = 2
"""For how many of the next requests blocks are loaded by default."""


@dataclass(frozen=True)
class Mismatch:
    """A block whose content was not what it should have been.

    Attributes:
        where: the request that was about to use it, or the pool it was found in at the end.
        block: which block, in the words of the trace.
        layer: first layer that differs, `tensor` and `byte` likewise.
        planes: how many tensors of the block differ, over all layers.
    """

    where: str
    block: str
    layer: int
    tensor: str
    byte: int
    planes: int

    def __str__(self) -> str:
        more = f" ({self.planes} tensors of the block differ)" if self.planes > 1 else ""
        return (
            f"{self.where}: {self.block}, layer {self.layer}, {self.tensor}: "
            f"first wrong byte {self.byte}{more}"
        )


@dataclass(frozen=True)
class Sample:
    """What one request did and how full the pools were then."""

    device_hits: int
    host_hits: int
    misses: int
    device_used: int
    host_used: int
    h2d_bytes: int
    d2h_bytes: int


@dataclass
class Totals:
    """Sums over all requests so far; `traffic` and `seconds` are there at the end of the run."""

    requests: int = 0
    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    stores: int = 0
    loads: int = 0
    private_blocks: int = 0
    unstored: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    checked: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    first_mismatches: list[Mismatch] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class _Plane:
    layer: int
    tensor: str


@dataclass(frozen=True)
class _Item:
    """A block for the compute lane: written if `write`, read back and compared if `check`."""

    serial: int
    label: BlockKey | str
    block: int
    write: bool
    check: bool


class _Group:
    """The planes whose payloads have one size, and the shared ramp for it."""

    def __init__(self, planes: range, payload: int) -> None:
        self.planes = planes
        self.payload = payload
        self.ramp = patterns.ramp(payload // 8)


class _Staging:
    """Pinned room for a few blocks of every plane."""

    def __init__(
        self, groups: Sequence[_Group], blocks: int, allocate: Callable[..., torch.Tensor]
    ) -> None:
        import torch

        self.tensors: list[torch.Tensor] = []
        self.words: list[patterns.Words] = []
        for group in groups:
            buffer = allocate((len(group.planes), blocks, group.payload), torch.int8)
            self.tensors.extend(buffer.unbind(0))
            self.words.append(buffer.numpy().view(np.uint64))


@dataclass
class _Slot:
    """A pair of staging buffers and what is under way in them."""

    written: _Staging
    read: _Staging
    done: Any = None
    items: list[_Item] = field(default_factory=list)
    where: str = ""


def free_memory(runtime: str) -> Memory:
    """Free memory for both pools on `runtime` (cann, sim or host)."""
    host = available_host_memory()
    if runtime == "host":
        return Memory(host, host, device_is_host=True)
    free, _ = npu().mem_get_info()
    return Memory(host, int(free), device_is_host=runtime == "sim")


class Replay:
    """Both pools with their memory, and one run of requests through them. Not thread-safe.

    Args:
        model: what a block consists of.
        block_map: the keys of blocks.
        sizes: blocks of each pool and how far payloads are shrunk.
        policy: `eager` stores a block when it is computed, `lazy` when the device evicts it.
        verify: `all` reads back every block a request uses, and both pools at the end; `sample` a
            few blocks of each request; `off` none.
        runtime: `cann`, `sim` or `host`; on `host` the device pool is CPU memory.
        backend: `scheduler` moves blocks with `NPUDmaCopyBackend`, `eager` with the operator.
        ahead: for how many of the next requests, at most, blocks are loaded while one is served.

    Raises:
        RuntimeError: memory for the pools cannot be had.
    """

    def __init__(
        self,
        model: KVModel,
        block_map: BlockMap,
        sizes: Sizes,
        *,
        policy: Policy,
        verify: Verify,
        runtime: str,
        backend: Backend = "scheduler",
        ahead: int = DEFAULT_AHEAD,
        seed: int = 0,
    ) -> None:
        import torch

        from npu_kv_ops import kv_cache, ops

        self._torch = torch
        self._raise_pending_errors = ops.raise_pending_errors
        self._swap = torch.ops.npu_kv.swap_blocks_batch
        self._block_map = block_map
        self._verify = verify
        self._ahead = ahead
        self.sizes = sizes
        self._random = random.Random(seed)
        self.totals = Totals()
        self.cache = TwoTierCache(sizes.device_blocks, sizes.host_blocks, policy)
        # What an earlier run left behind in the memory of the pools must not pass for this one's.
        self._first_serial = secrets.randbits(61)
        self._serials: dict[BlockKey, int] = {}
        self._private_serials = itertools.count(_PRIVATE_SERIALS)

        device = torch.device("cpu" if runtime == "host" else "npu")
        if device.type == "npu":
            device = torch.device("npu", npu().current_device())
        dtype = getattr(torch, model.dtype)
        payloads = [
            model.payload_bytes(t, block_map.block_tokens, sizes.shrink) for t in model.tensors
        ]
        caches = {
            f"model.layers.{layer}.self_attn": tuple(
                torch.empty(
                    (sizes.device_blocks, payload // dtype.itemsize), dtype=dtype, device=device
                )
                for payload in payloads
            )
            for layer in range(model.layers)
        }
        views = kv_cache.block_views(caches, sizes.device_blocks)
        mirrors = kv_cache.host_mirror(views, sizes.host_blocks)
        names = {view.data_ptr(): name for name, view in views.items()}

        # Planes with equal payloads stand together, so that one numpy call fills all of them.
        self._planes: list[_Plane] = []
        self._groups: list[_Group] = []
        self.device_tensors: list[torch.Tensor] = []
        self.host_tensors: list[torch.Tensor] = []
        for payload in sorted(set(payloads)):
            start = len(self._planes)
            for layer, tensors in enumerate(caches.values()):
                for tensor, spec, size in zip(tensors, model.tensors, payloads):
                    if size == payload:
                        name = names[tensor.data_ptr()]
                        self._planes.append(_Plane(layer, spec.name))
                        self.device_tensors.append(views[name])
                        self.host_tensors.append(mirrors[name])
            self._groups.append(_Group(range(start, len(self._planes)), payload))

        def staging() -> _Staging:
            return _Staging(self._groups, sizes.staging_blocks, kv_cache.empty_pinned)

        self._slots = [_Slot(staging(), staging()) for _ in range(2)]
        self._turn = 0
        self._mover = MOVERS[backend](self.device_tensors, self.host_tensors)

    def run(
        self,
        requests: Sequence[Request],
        needs: Sequence[BlockNeed],
        *,
        speed: float | None = None,
        progress: Callable[[], None] = lambda: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Serves `requests` one after another, once; `totals` holds the sums at any time.

        Args:
            speed: a request starts no earlier than its timestamp divided by this; None: at once.
            progress: called after each request.
            stop: asked before a request starts; True ends the run after those that have started.

        Returns:
            whether all requests were served.
        """
        begin = time.perf_counter()
        first_ms = requests[0].timestamp_ms if requests else 0.0

        def early(request: Request) -> float:
            """Seconds until it may start."""
            if speed is None:
                return 0.0
            due = begin + (request.timestamp_ms - first_ms) / 1000 / speed
            return due - time.perf_counter()

        # Those whose loads are launched, in order; only the first may be computing.
        started: deque[tuple[Request, Step]] = deque()

        def serve_first() -> None:
            self._serve(*started.popleft())
            progress()

        complete = True
        try:
            for request, need in zip(requests, needs):
                while started and (
                    len(started) > self._ahead or early(request) > 0 or not self.cache.fits(need)
                ):
                    serve_first()
                while (left := early(request)) > 0 and not stop():
                    time.sleep(min(left, _PAUSE_SECONDS))
                if stop():
                    complete = False
                    break
                started.append((request, self._start(need)))
            while started:
                serve_first()
            self._finish(sweep=complete and self._verify == "all")
        finally:
            self.totals.seconds = time.perf_counter() - begin
            self._mover.close()
            self.totals.traffic = self._mover.traffic()
        return complete

    def _start(self, need: BlockNeed) -> Step:
        """Gives a request its blocks and launches what has to be in them before it computes."""
        step = self.cache.admit(need)
        self._mover.store(step.evict_stores)
        self._mover.load(step.loads)
        self.totals.stores += len(step.evict_stores)
        self.totals.loads += len(step.loads)
        return step

    def _serve(self, request: Request, step: Step) -> None:
        totals = self.totals
        where = f"request {totals.requests + 1} (line {request.line})"
        self._compute(where, self._items(step.resident, {key for key, _ in step.computed}))
        self._compute(where, self._private_items(step.private))
        self._mover.store(step.stores)
        totals.stores += len(step.stores)
        device_used = self.cache.device.size - len(self.cache.device.free)
        self.cache.finish(step)

        totals.requests += 1
        totals.device_hits += step.device_hits
        totals.host_hits += len(step.loads)
        totals.misses += len(step.computed)
        totals.private_blocks += len(step.private)
        totals.unstored += step.unstored
        totals.samples.append(
            Sample(
                step.device_hits,
                len(step.loads),
                len(step.computed),
                device_used,
                len(self.cache.host),
                len(step.loads) * self.sizes.block_bytes,
                (len(step.evict_stores) + len(step.stores)) * self.sizes.block_bytes,
            )
        )

    def _serial(self, key: BlockKey) -> int:
        return self._serials.setdefault(key, self._first_serial + len(self._serials))

    def _items(
        self, resident: Sequence[tuple[BlockKey, int]], computed: set[BlockKey]
    ) -> list[_Item]:
        sampled: set[BlockKey] = set()
        if self._verify == "sample":
            keys = [key for key, _ in resident]
            sampled = set(self._random.sample(keys, min(_SAMPLED_BLOCKS, len(keys))))
        return [
            _Item(
                self._serial(key),
                key,
                block,
                key in computed,
                self._verify == "all" or key in sampled,
            )
            for key, block in resident
        ]

    def _private_items(self, blocks: Sequence[int]) -> list[_Item]:
        return [
            _Item(
                next(self._private_serials),
                f"own block {position + 1} of {len(blocks)} after the full prompt blocks",
                block,
                True,
                self._verify == "all",
            )
            for position, block in enumerate(blocks)
        ]

    def _compute(self, where: str, items: Sequence[_Item]) -> None:
        """Writes and reads back `items` on the compute lane, a staging buffer at a time."""
        work = [item for item in items if item.write or item.check]
        for start in range(0, len(work), self.sizes.staging_blocks):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            self._settle(slot)
            slot.items = work[start : start + self.sizes.staging_blocks]
            slot.where = where
            self._expect(slot)
            self._launch(slot)

    def _expect(self, slot: _Slot) -> None:
        """Puts what the blocks of `slot` should hold into its write buffer."""
        serials = np.array([item.serial for item in slot.items], dtype=np.uint64)
        for group, words in zip(self._groups, slot.written.words):
            seeds = patterns.block_seeds(serials, np.asarray(group.planes))
            patterns.write(words[:, : len(slot.items)], seeds, group.ramp)

    def _launch(self, slot: _Slot) -> None:
        torch = self._torch
        writes = [row for row, item in enumerate(slot.items) if item.write]
        checks = [row for row, item in enumerate(slot.items) if item.check]
        blocks = [item.block for item in slot.items]
        with self._mover.compute(blocks) as slot.done:
            for rows, is_write in ((writes, True), (checks, False)):
                if not rows:
                    continue
                row_ids = torch.tensor(rows)
                block_ids = torch.tensor([blocks[row] for row in rows])
                if is_write:
                    self._swap(slot.written.tensors, self.device_tensors, row_ids, block_ids)
                else:
                    self._swap(self.device_tensors, slot.read.tensors, block_ids, row_ids)

    def _settle(self, slot: _Slot) -> None:
        """Waits for `slot` and compares what came back."""
        if slot.done is not None:
            slot.done.synchronize()
            slot.done = None
        rows = [row for row, item in enumerate(slot.items) if item.check]
        if rows:
            whole = len(rows) == len(slot.items)
            chosen: Any = slice(0, len(rows)) if whole else rows
            pairs = [
                (read[:, chosen], written[:, chosen])
                for read, written in zip(slot.read.words, slot.written.words)
            ]
            labels = [slot.items[row].label for row in rows]
            self._compare(slot.where, labels, pairs)
        slot.items = []

    def _compare(
        self,
        where: str,
        labels: Sequence[BlockKey | str],
        pairs: Sequence[tuple[patterns.Words, patterns.Words]],
    ) -> None:
        """Compares actual and expected words, for each group [planes, blocks, words]."""
        self.totals.checked += len(labels)
        if all(np.array_equal(actual, expected) for actual, expected in pairs):
            return
        for row, label in enumerate(labels):
            wrong = [
                (plane, byte)
                for group, (actual, expected) in zip(self._groups, pairs)
                for i, plane in enumerate(group.planes)
                if (byte := patterns.first_difference(actual[i, row], expected[i, row])) is not None
            ]
            if not wrong:
                continue
            self.totals.mismatches += 1
            if len(self.totals.first_mismatches) < _KEPT_MISMATCHES:
                index, byte = min(wrong, key=lambda w: self._planes[w[0]].layer)
                plane = self._planes[index]
                block = label if isinstance(label, str) else self._block_map.describe(label)
                self.totals.first_mismatches.append(
                    Mismatch(where, block, plane.layer, plane.tensor, byte, len(wrong))
                )

    def _finish(self, *, sweep: bool) -> None:
        """Settles everything under way; with `sweep` checks all blocks of both pools once more."""
        if sweep:
            resident = self.cache.device.items()
            self._compute("device pool at the end", self._items(resident, set()))
        for slot in self._slots:
            self._settle(slot)
        self._mover.synchronize()
        self._raise_pending_errors()
        if sweep:
            for chunk in _chunks(self.cache.host.items(), self.sizes.staging_blocks):
                self._check_host(chunk)

    def _check_host(self, chunk: Sequence[tuple[BlockKey, int]]) -> None:
        blocks = [block for _, block in chunk]
        serials = np.array([self._serial(key) for key, _ in chunk], dtype=np.uint64)
        pairs = []
        for group, scratch in zip(self._groups, self._slots[0].written.words):
            expected = scratch[:, : len(chunk)]
            patterns.write(
                expected, patterns.block_seeds(serials, np.asarray(group.planes)), group.ramp
            )
            actual = np.stack(
                [self.host_tensors[plane].numpy().view(np.uint64)[blocks] for plane in group.planes]
            )
            pairs.append((actual, expected))
        self._compare("host pool at the end", [key for key, _ in chunk], pairs)


def _chunks(
    items: Sequence[tuple[BlockKey, int]], size: int
) -> Iterator[Sequence[tuple[BlockKey, int]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

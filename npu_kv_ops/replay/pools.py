"""What is where: a device pool over a host pool, both with LRU eviction. Moves no bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .trace import BlockKey, BlockNeed

Policy = Literal["eager", "lazy"]


class FreeIds:
    """The free ids of a pool, handed out in runs of neighbours where that is possible.

    Neighbouring blocks become one copy, so an allocation takes the smallest free run that holds
    all of it, else the largest runs first. Not thread-safe.
    """

    def __init__(self, count: int) -> None:
        self._free = np.ones(count, dtype=bool)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> list[int]:
        """`count` ids, ascending within each run.

        Raises:
            ValueError: fewer are free.
        """
        if count > self._count:
            raise ValueError(f"count is {count}, only {self._count} ids are free")
        if count == 0:
            return []
        edges = np.diff(self._free.astype(np.int8), prepend=0, append=0)
        starts = np.flatnonzero(edges == 1)
        lengths = np.flatnonzero(edges == -1) - starts
        fitting = np.flatnonzero(lengths >= count)
        if fitting.size:
            start = int(starts[fitting[np.argmin(lengths[fitting])]])
            taken = list(range(start, start + count))
        else:
            taken = []
            for run in np.argsort(-lengths, kind="stable"):
                length = min(int(lengths[run]), count - len(taken))
                taken.extend(range(int(starts[run]), int(starts[run]) + length))
                if len(taken) == count:
                    break
        self._free[taken] = False
        self._count -= count
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Frees `ids`.

        Raises:
            ValueError: one of them is free already.
        """
        if len(ids) == 0:
            return
        if len(set(ids)) != len(ids) or self._free[list(ids)].any():
            raise ValueError(f"ids {list(ids)} holds one that is free already")
        self._free[list(ids)] = True
        self._count += len(ids)


class LruPool:
    """Blocks of one pool by key, least recently used first. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = FreeIds(size)
        self._blocks: OrderedDict[BlockKey, int] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, key: BlockKey) -> int:
        return self._blocks[key]

    def items(self) -> list[tuple[BlockKey, int]]:
        """Keys and ids, least recently used first."""
        return list(self._blocks.items())

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Makes those of `keys` that are here the most recently used, the last one most."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def make_room(self, count: int, in_use: Collection[BlockKey]) -> list[tuple[BlockKey, int]]:
        """Evicts until `count` ids are free, least recently used first, none of `in_use`.

        Returns:
            what was evicted, oldest first. Fewer ids may be free if the rest is in use.
        """
        evicted: list[tuple[BlockKey, int]] = []
        missing = count - len(self.free)
        if missing > 0:
            for key, block in self._blocks.items():
                if key not in in_use:
                    evicted.append((key, block))
                    if len(evicted) == missing:
                        break
            for key, _ in evicted:
                del self._blocks[key]
            self.free.give_back([block for _, block in evicted])
        return evicted

    def insert(self, keys: Sequence[BlockKey]) -> list[int]:
        """Gives new `keys` ids, in order; they become the most recently used."""
        ids = self.free.take(len(keys))
        self._blocks.update(zip(keys, ids))
        return ids


@dataclass(frozen=True)
class Move:
    """One block to copy between the pools."""

    key: BlockKey
    device_block: int
    host_block: int


@dataclass
class Step:
    """What has to happen for one request, in this order.

    Attributes:
        evict_stores: device blocks that leave the device pool and are kept on the host (lazy).
        loads: host hits. Their device blocks may be those that `evict_stores` gave up.
        computed: misses: key and device block, in prompt order.
        private: device blocks for the rest of the prompt and the output.
        stores: computed blocks to keep on the host as well (eager).
        resident: every block of the prompt and where it is now, in prompt order.
        device_hits: how many of them were on the device already.
        unstored: blocks that found no room on the host.
    """

    evict_stores: list[Move] = field(default_factory=list)
    loads: list[Move] = field(default_factory=list)
    computed: list[tuple[BlockKey, int]] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)
    resident: list[tuple[BlockKey, int]] = field(default_factory=list)
    device_hits: int = 0
    unstored: int = 0


class TwoTierCache:
    """Decides hits, loads, stores and evictions for one request after another.

    A prompt's blocks are looked up on the device, then on the host. Host hits stay on the host as
    well. Afterwards the head of the prompt counts as used later than its tail, so LRU drops tails
    before heads and what is left of a prompt is a prefix.

    A request is at hand from `admit` to `finish`, and several may be at once. Their device blocks
    are never evicted. Host blocks may be reused as soon as the moves of a step are ordered behind
    those of the steps before it. Not thread-safe.
    """

    def __init__(self, device_blocks: int, host_blocks: int, policy: Policy) -> None:
        if policy not in ("eager", "lazy"):
            raise ValueError(f"policy is {policy!r}, it must be 'eager' or 'lazy'")
        self.device = LruPool(device_blocks)
        self.host = LruPool(host_blocks)
        self.policy = policy
        self._in_use: Counter[BlockKey] = Counter()
        self._private = 0

    def fits(self, need: BlockNeed) -> bool:
        """Whether the device pool holds the request next to those at hand."""
        others = len(self._in_use) - sum(1 for key in need.keys if key in self._in_use)
        return need.total + others + self._private <= self.device.size

    def _store(
        self, leaving: Sequence[tuple[BlockKey, int]], reading: Collection[BlockKey]
    ) -> list[Move]:
        """Gives `leaving` (oldest first, no more than fit) room on the host."""
        self.host.make_room(len(leaving), reading)
        # Host ids follow device ids, so that neighbours stay neighbours; age follows `leaving`.
        by_block = sorted(leaving, key=lambda item: item[1])
        ids = self.host.insert([key for key, _ in by_block])
        self.host.touch(key for key, _ in leaving)
        return [Move(key, block, host) for (key, block), host in zip(by_block, ids)]

    def admit(self, need: BlockNeed) -> Step:
        """Gives the request its device blocks, until `finish`.

        Raises:
            ValueError: the device pool is too small for it, or for it and those at hand.
        """
        if need.total > self.device.size:
            raise ValueError(
                f"the request needs {need.total} device blocks, the pool has {self.device.size}"
            )
        if not self.fits(need):
            raise ValueError(
                f"the request needs {need.total} device blocks, which the requests at hand do not "
                "leave: finish one of them first"
            )
        self._in_use.update(need.keys)
        self._private += need.private
        self.device.touch(reversed(need.keys))
        self.host.touch(reversed(need.keys))
        new = [key for key in need.keys if key not in self.device]
        on_host = {key for key in new if key in self.host}
        host_room = self.host.size - len(on_host)
        step = Step(device_hits=len(need.keys) - len(new))

        evicted = self.device.make_room(len(new) + need.private, self._in_use)
        if self.policy == "lazy":
            leaving = [item for item in evicted if item[0] not in self.host]
            kept = leaving[max(0, len(leaving) - host_room) :]
            step.evict_stores = self._store(kept, on_host)
            step.unstored = len(leaving) - len(kept)

        for key, block in zip(new, self.device.insert(new)):
            if key in on_host:
                step.loads.append(Move(key, block, self.host[key]))
            else:
                step.computed.append((key, block))
        step.private = self.device.free.take(need.private)

        if self.policy == "eager":
            # If the host cannot hold all of them, it keeps the head of the prompt.
            kept = step.computed[:host_room]
            step.stores = self._store(kept, on_host)
            step.unstored = len(step.computed) - len(kept)

        step.resident = [(key, self.device[key]) for key in need.keys]
        self.device.touch(reversed(need.keys))
        self.host.touch(reversed(need.keys))
        return step

    def finish(self, step: Step) -> None:
        """Frees what only this request could use, and lets its other blocks be evicted."""
        self.device.free.give_back(step.private)
        self._private -= len(step.private)
        for key, _ in step.resident:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]

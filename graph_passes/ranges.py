"""Ranges of bytes, and what is known of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class MemoryRange(NamedTuple):
    """Bytes of one storage.

    Attributes:
        storage: which one.
        begin: the first byte.
        end: behind the last one; None: unknown, because a size is a symbol.
        period: if not 0, only the first ``width`` of every ``period`` bytes, as of keys that lie
            beside values in each block.
        width: see ``period``.
    """

    storage: int
    begin: int
    end: int | None
    period: int = 0
    width: int = 0

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether they may share a byte."""
        if self.storage != other.storage:
            return False
        if self.end is not None and other.begin >= self.end:
            return False
        if other.end is not None and self.begin >= other.end:
            return False
        period = self.period or other.period
        if period == 0 or (other.period or period) != period:
            return True
        ahead = (other.begin - self.begin) % period
        # One without a period is long enough to reach every place of it, or is within one.
        return ahead < self._width_in(period) or period - ahead < other._width_in(period)

    def _width_in(self, period: int) -> int:
        if self.period:
            return self.width
        return period if self.end is None else min(self.end - self.begin, period)


def storage_of(value: torch.Tensor) -> int | None:
    """The storage of a traced tensor; None when it has none.

    Tensors that shared a storage before they were traced share it in their traces too.
    """
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def range_of(value: torch.Tensor) -> MemoryRange | None:
    """The bytes of a traced tensor; None when it has no storage."""
    storage = storage_of(value)
    if storage is None:
        return None
    item, offset = value.element_size(), value.storage_offset()
    return extent(storage, item, offset, value.shape, value.stride())


def extent(
    storage: int, item: int, offset: Any, sizes: Iterable[Any], strides: Iterable[Any]
) -> MemoryRange:
    """The bytes of a strided tensor; its numbers are in elements of ``item`` bytes, or symbols."""
    if not isinstance(offset, int):
        return MemoryRange(storage, 0, None)
    begin, last, outer, steps = offset * item, 0, 0, 0
    for size, stride in zip(sizes, strides, strict=True):
        if not isinstance(size, int) or not isinstance(stride, int):
            return MemoryRange(storage, begin, None)
        if size == 0:
            return MemoryRange(storage, begin, begin)
        last += (size - 1) * stride
        if size > 1 and stride > outer:
            outer, steps = stride, size - 1
    end = begin + (last + 1) * item
    width = last - steps * outer + 1
    if width >= outer:
        return MemoryRange(storage, begin, end)
    return MemoryRange(storage, begin, end, outer * item, width * item)


class RangeMap(Generic[T]):
    """Something for every range, to be found by overlap.

    Quick when few ranges overlap: the time of a look-up grows with the number of those that reach
    as far as the range that is asked for.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._entries: dict[MemoryRange, T] = {}
        self._sorted: dict[int, tuple[list[MemoryRange], list[float]]] | None = None

    def __getitem__(self, memory: MemoryRange) -> T:
        entry = self._entries.get(memory)
        if entry is None:
            entry = self._entries[memory] = self._make()
            self._sorted = None
        return entry

    def overlapping(self, memory: MemoryRange) -> Iterator[T]:
        """What there is for the ranges that overlap ``memory``."""
        if self._sorted is None:
            self._sorted = self._sort()
        ranges, reach = self._sorted.get(memory.storage, ((), ()))
        last = len(ranges)
        if memory.end is not None:
            last = bisect.bisect_left(ranges, memory.end, key=lambda one: one.begin)
        # Downwards, until none of those below reaches so far.
        for index in range(last - 1, -1, -1):
            if reach[index] <= memory.begin:
                break
            if ranges[index].overlaps(memory):
                yield self._entries[ranges[index]]

    def _sort(self) -> dict[int, tuple[list[MemoryRange], list[float]]]:
        by_storage: dict[int, list[MemoryRange]] = {}
        for memory in self._entries:
            by_storage.setdefault(memory.storage, []).append(memory)
        found = {}
        for storage, ranges in by_storage.items():
            ranges.sort(key=lambda one: one.begin)
            reach: list[float] = []
            for memory in ranges:
                end = float("inf") if memory.end is None else memory.end
                reach.append(max(end, reach[-1]) if reach else end)
            found[storage] = (ranges, reach)
        return found

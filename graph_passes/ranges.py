"""Ranges of bytes, and what is known of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class MemoryRange(NamedTuple):
    """Bytes of one storage. An end of None: unknown, because a size is a symbol."""

    storage: int
    begin: int
    end: int | None

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether they may share a byte."""
        return (
            self.storage == other.storage
            and (self.end is None or other.begin < self.end)
            and (other.end is None or self.begin < other.end)
        )


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
    begin, last = offset * item, 0
    for size, stride in zip(sizes, strides, strict=True):
        if not isinstance(size, int) or not isinstance(stride, int):
            return MemoryRange(storage, begin, None)
        if size == 0:
            return MemoryRange(storage, begin, begin)
        last += (size - 1) * stride
    return MemoryRange(storage, begin, begin + (last + 1) * item)


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

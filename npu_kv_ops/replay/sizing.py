"""How large the pools are, and how far blocks must shrink for them to fit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .models import KVModel
from .trace import BlockNeed, Request

GIB = 1 << 30

_WORK_BYTES = 16 * GIB
"""Bytes of blocks that a replay writes at most by default: what keeps it to minutes."""

_STAGING_BYTES = 8 << 20
_SHARE = 0.5
_POOL_BYTES = 3 * GIB
"""Pools chosen here take at most this part of the free memory, and at most so many bytes."""


class SizingError(ValueError):
    """Pools that cannot hold the requests, or that memory cannot hold."""


@dataclass(frozen=True)
class Memory:
    """Free memory in bytes. On real NPUs `device` is memory of its own; else it comes from host."""

    host: int
    device: int
    device_is_host: bool


@dataclass(frozen=True)
class Sizes:
    """The sizes of a replay; `chosen` names those that the user left open."""

    device_blocks: int
    host_blocks: int
    shrink: int
    block_bytes: int
    full_block_bytes: int
    chosen: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.device_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.host_blocks * self.block_bytes

    @property
    def staging_blocks(self) -> int:
        """Blocks that one staging buffer holds."""
        return max(1, min(256, _STAGING_BYTES // self.block_bytes))

    @property
    def staging_bytes(self) -> int:
        """Pinned bytes beyond the pools: two buffers to write from, two to read back into."""
        return 4 * self.staging_blocks * self.block_bytes


def _number_in(path: Path, key: str = "") -> int | None:
    """The number in a file, or after `key` on a line of its own; None if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name == key and value.isdigit():
            return int(value)
    return None


def available_host_memory() -> int:
    """Bytes of RAM that this process can still get: free RAM, or less inside a container."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number_in(Path(folder, limit_name))
        used = _number_in(Path(folder, used_name))
        if limit is not None and used is not None:
            # Pages of the file cache count as used, but are given up when memory is asked for.
            cache = _number_in(Path(folder, "memory.stat"), "inactive_file") or 0
            available = min(available, max(0, limit - used + cache))
    return available


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def choose_sizes(
    model: KVModel,
    block_tokens: int,
    requests: Sequence[Request],
    needs: Sequence[BlockNeed],
    memory: Memory,
    *,
    device_blocks: int | None = None,
    host_blocks: int | None = None,
    shrink: int | None = None,
) -> Sizes:
    """Sizes as given, and for what is left open:

    - the device pool holds twice the largest request;
    - the host pool is eight times the device pool, but no larger than all distinct blocks of the
      trace and no smaller than four times the device pool;
    - blocks shrink by the smallest power of two that fits both pools into half of the free memory
      and into 3 GiB, and all blocks of the trace into 16 GiB.

    Raises:
        SizingError: a request does not fit into the device pool (names its line), or the pools do
            not fit into memory.
    """
    largest = max(range(len(needs)), key=lambda i: needs[i].total)
    most = needs[largest].total
    chosen: list[str] = []
    if device_blocks is None:
        device_blocks = _round_up(2 * most, 64)
        chosen.append("device_blocks")
    if device_blocks < most:
        too_large = sum(1 for need in needs if need.total > device_blocks)
        raise SizingError(
            f"{too_large} of {len(needs)} requests need more than {device_blocks} device blocks; "
            f"the largest, line {requests[largest].line}, needs {most}: "
            f"use --device-blocks {most} or more"
        )
    if host_blocks is None:
        distinct = len({key for need in needs for key in need.keys})
        host_blocks = min(8 * device_blocks, max(4 * device_blocks, _round_up(distinct, 64)))
        chosen.append("host_blocks")

    def sized(factor: int) -> Sizes:
        return Sizes(
            device_blocks,
            host_blocks,
            factor,
            model.block_bytes(block_tokens, factor),
            model.block_bytes(block_tokens),
            tuple(chosen),
        )

    def short_of(sizes: Sizes, share: float) -> str | None:
        """Which memory `sizes` would overrun if it may take `share` of what is free."""
        host_bytes = sizes.host_bytes + sizes.staging_bytes
        if memory.device_is_host:
            host_bytes += sizes.device_bytes
        if sizes.device_bytes > share * memory.device:
            return f"device pool: {sizes.device_bytes} bytes, free on the device: {memory.device}"
        if host_bytes > share * memory.host:
            return f"pools and staging: {host_bytes} bytes, free on the host: {memory.host}"
        return None

    if shrink is not None:
        sizes = sized(shrink)
        shortage = short_of(sizes, 1.0)
        if shortage is not None:
            raise SizingError(f"{shortage}: raise --shrink, or lower the number of blocks")
        return sizes

    chosen.append("shrink")
    total_blocks = sum(need.total for need in needs)
    factor = 1
    while True:
        sizes = sized(factor)
        shortage = short_of(sizes, _SHARE)
        quick = (
            total_blocks * sizes.block_bytes <= _WORK_BYTES
            and sizes.device_bytes + sizes.host_bytes <= _POOL_BYTES
        )
        if shortage is None and quick:
            return sizes
        if factor > 1 and sizes.block_bytes == sized(factor // 2).block_bytes:
            if shortage is None:
                return sizes  # as small as blocks get; it merely takes longer
            raise SizingError(
                f"{shortage}: lower --device-blocks or --host-blocks, or raise --block-tokens; the "
                f"largest request, line {requests[largest].line}, needs {most} device blocks"
            )
        factor *= 2

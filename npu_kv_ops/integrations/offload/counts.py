"""What a worker counts between two reports to vLLM. Imports neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["DIRECTIONS", "LaneCounts", "TransferCounts"]

DIRECTIONS = ("load", "store")


@dataclass
class LaneCounts:
    """One direction. Blocks and bytes are those of transfers that went well.

    Attributes:
        transfers: transfers that went well.
        failures: transfers that failed.
        blocks: blocks, each with the bytes of all layers.
        bytes: bytes.
        seconds: for each transfer, from the launch to the engine step that saw its end.
    """

    transfers: int = 0
    failures: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass
class TransferCounts:
    """Both directions since the last report.

    Attributes:
        loads: host to device.
        stores: device to host.
        queue_depth: transfers that are launched and have not ended, at the time of the report.
    """

    loads: LaneCounts = field(default_factory=LaneCounts)
    stores: LaneCounts = field(default_factory=LaneCounts)
    queue_depth: int = 0

    def lanes(self) -> tuple[tuple[str, LaneCounts], ...]:
        """Return the directions by their names in metrics."""
        return tuple(zip(DIRECTIONS, (self.loads, self.stores), strict=True))

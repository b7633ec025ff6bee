"""The options of the connector: ``kv_connector_extra_config`` checked and in bytes per rank.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT_CPU_BYTES", "OPTIONS", "OffloadConfig"]

DEFAULT_CPU_BYTES = 8 << 30  # what vLLM's own connector takes

OPTIONS = {
    "cpu_bytes_to_use": "bytes of host memory for all ranks together (default 8 GiB)",
    "cpu_bytes_to_use_per_rank": "bytes of host memory for each rank, instead of the former",
    "lazy_offload": "false: store blocks when they are complete; true: shortly before eviction",
    "kv_offload_backend": 'only "cpu", which is the default',
}


@dataclass(frozen=True)
class OffloadConfig:
    """What ``kv_connector_extra_config`` asks for.

    Attributes:
        cpu_bytes_per_rank: capacity of the host pool of one rank, in bytes.
        lazy_offload: when blocks are stored.
    """

    cpu_bytes_per_rank: int
    lazy_offload: bool

    @classmethod
    def parse(cls, extra: Mapping[str, Any], world_size: int) -> OffloadConfig:
        """Check the options of ``extra``; ``world_size`` is the number of ranks.

        Raises:
            ValueError: an option that does not exist, with the list of those that do, or a value
                that is not allowed.
        """
        unknown = [key for key in extra if key not in OPTIONS]
        if unknown:
            valid = "".join(f"\n  {key}: {text}" for key, text in OPTIONS.items())
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(map(repr, unknown))}; valid are:{valid}"
            )
        backend = extra.get("kv_offload_backend", "cpu")
        if backend != "cpu":
            raise ValueError(
                f'kv_offload_backend is {backend!r}, allowed is "cpu"; for a disk tier use '
                "vLLM's SimpleCPUOffloadConnector"
            )
        lazy = extra.get("lazy_offload", False)
        if not isinstance(lazy, bool):
            raise ValueError(f"lazy_offload is {lazy!r}, allowed are true and false")
        total = _bytes("cpu_bytes_to_use", extra.get("cpu_bytes_to_use", DEFAULT_CPU_BYTES))
        per_rank = total // world_size
        if "cpu_bytes_to_use_per_rank" in extra:
            per_rank = _bytes("cpu_bytes_to_use_per_rank", extra["cpu_bytes_to_use_per_rank"])
        if per_rank < 1:
            raise ValueError(
                f"cpu_bytes_to_use is {total}, less than a byte for each of {world_size} ranks"
            )
        return cls(per_rank, lazy)


def _bytes(key: str, value: object) -> int:
    # JSON writes 8e9 as a float.
    whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (isinstance(value, int) or whole):
        raise ValueError(f"{key} is {value!r}, allowed is a whole number of bytes")
    number = int(value)  # type: ignore[call-overload]
    if number < 1:
        raise ValueError(f"{key} is {number}, allowed are bytes from 1")
    return int(number)

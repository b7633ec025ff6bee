"""What :class:`npu_kv_ops.NPUDmaCopyBackend` takes: checked, and in the form that the core wants.

Everything here raises before anything is started or queued, and names the argument, its value and
what was allowed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from npu_kv_ops import _C

__all__ = ["Caches", "CopyPools", "block_ids", "npu", "pools", "stream_id", "timeout_seconds"]

# torch_npu's module, None where it is not loaded: then every pool is in host memory.
npu: Any = getattr(torch, "npu", None)

Caches = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


class CopyPools(NamedTuple):
    """Two pools of the same tensors, by name, and the device of the first (the CPU: host pools)."""

    npu: dict[str, torch.Tensor]
    cpu: dict[str, torch.Tensor]
    device: torch.device

    def layouts(self) -> tuple[list[_C.Layout], list[_C.Layout]]:
        """Return base address, block stride, payload bytes and number of blocks of each tensor."""
        return (
            [_layout("npu_caches", name, tensor) for name, tensor in self.npu.items()],
            [_layout("cpu_caches", name, tensor) for name, tensor in self.cpu.items()],
        )

    def pageable(self) -> str | None:
        """Return the name of a host tensor that is not page-locked, None if there is none."""
        for name, tensor in self.cpu.items():
            if tensor.numel() and not _C.is_page_locked(tensor.data_ptr()):
                return name
        return None

    def warn_of_pageable(self, stacklevel: int) -> None:
        """Warn if a host tensor is not page-locked."""
        name = self.pageable()
        if name is not None:
            warnings.warn(
                f"cpu_caches[{name}] is in page-able memory: its copies are synchronous and hold "
                "up the scheduler thread. npu_kv_ops.host_mirror makes page-locked pools",
                stacklevel=stacklevel + 1,
            )


def pools(
    npu_caches: Caches, cpu_caches: Caches, device: torch.device | str | int | None
) -> CopyPools:
    """Check that two pools hold the same tensors and that they are where they have to be."""
    on_npu, on_cpu = _named("npu_caches", npu_caches), _named("cpu_caches", cpu_caches)
    if list(on_npu) != list(on_cpu):
        raise ValueError(
            f"npu_caches and cpu_caches need the same keys in the same order, got {list(on_npu)} "
            f"and {list(on_cpu)}"
        )
    if not on_npu:
        raise ValueError("npu_caches is empty, allowed is one tensor or more")
    for name, tensor in on_npu.items():
        other = on_cpu[name]
        if other.device.type != "cpu":
            raise ValueError(f"cpu_caches[{name}] is on {other.device}, allowed is the CPU")
        if tensor.dtype != other.dtype:
            raise TypeError(f"{name}: npu_caches has {tensor.dtype}, cpu_caches {other.dtype}")
        mine, theirs = _payload_bytes(tensor), _payload_bytes(other)
        if len(tensor) and len(other) and mine != theirs:
            raise ValueError(
                f"{name}: a block has {mine} bytes in npu_caches, {theirs} in cpu_caches"
            )
    return CopyPools(on_npu, on_cpu, _device_of(on_npu, device))


def block_ids(argument: str, ids: Any) -> Any:
    """Return ids as the bindings take them: a list or tuple, or an array that is a buffer."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise TypeError(f"{argument} is on {ids.device}, allowed are ids on the CPU")
        return ids.detach().contiguous().numpy()
    return ids


def stream_id(argument: str, stream: Any, device: torch.device) -> int | None:
    """Return torch_npu's number of a stream; None stays None."""
    if stream is None:
        return None
    if device.type == "cpu":
        raise ValueError(f"{argument}: pools in host memory use no streams, allowed is None")
    if not isinstance(stream, npu.Stream) or stream.device != device:
        raise ValueError(f"{argument} is {stream!r}, allowed are None and streams of {device}")
    return int(stream.stream_id)


def timeout_seconds(timeout: float | None) -> float | None:
    """Return the timeout if it is one."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise ValueError(f"timeout is {timeout!r}, allowed are None and seconds from 0")
    return timeout


def _named(argument: str, caches: object) -> dict[str, Any]:
    if isinstance(caches, Mapping):
        named = dict(caches)
    elif isinstance(caches, Sequence):
        named = {str(i): tensor for i, tensor in enumerate(caches)}
    else:
        raise TypeError(
            f"{argument} is a {type(caches).__name__}, allowed are a dict and a list of tensors"
        )
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument}[{name}] is a {type(tensor).__name__}, allowed is a tensor")
        if tensor.dim() == 0:
            raise ValueError(f"{argument}[{name}] has no dimension; dimension 0 is the block")
    return named


def _payload_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size() if len(tensor) else 0


def _device_of(
    caches: Mapping[str, torch.Tensor], asked: torch.device | str | int | None
) -> torch.device:
    devices = {tensor.device for tensor in caches.values()}
    if len(devices) > 1:
        raise ValueError(f"npu_caches are on {sorted(map(str, devices))}, allowed is one device")
    device = devices.pop()
    if device.type not in ("cpu", "npu"):
        raise ValueError(f"npu_caches are on {device}, allowed are an NPU and the CPU")
    if asked is not None:
        wanted = torch.device("npu", asked) if isinstance(asked, int) else torch.device(asked)
        if wanted.type != device.type or wanted.index not in (None, device.index):
            raise ValueError(f"device is {wanted}, but npu_caches are on {device}")
    return device


def _layout(argument: str, name: str, tensor: torch.Tensor) -> _C.Layout:
    blocks = len(tensor)
    if blocks and not tensor[0].is_contiguous():
        raise ValueError(
            f"{argument}[{name}]: the payload of a block is not contiguous: shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    payload = _payload_bytes(tensor)
    stride = tensor.stride(0) * tensor.element_size() if blocks > 1 else payload
    if stride < payload:
        raise ValueError(
            f"{argument}[{name}]: blocks overlap: stride(0) is {stride} bytes, a block has "
            f"{payload}"
        )
    return tensor.data_ptr(), stride, payload, blocks

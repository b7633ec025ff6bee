"""The fake kernels that are in Python, because a Meta kernel cannot take tensors of two devices and
return one. To be imported when the libraries are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_kv_ops import _C

_swap = torch.ops.npu_kv.swap_blocks_batch


def _ticket(parts: Sequence[int] | None, tensors: int) -> torch.Tensor:
    _C.check_parts(parts, tensors)
    return torch.empty((), dtype=torch.int64)


def _start(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    parts: Sequence[int] | None = None,
) -> torch.Tensor:
    _swap(src, dst, src_blocks, dst_blocks)  # makes all its checks
    return _ticket(parts, len(src))


def _start_static(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    parts: Sequence[int] | None = None,
) -> torch.Tensor:
    _swap.static(src, dst, src_blocks, dst_blocks)
    return _ticket(parts, len(src))


torch.library.register_fake("npu_kv::swap_blocks_start", _start)
torch.library.register_fake("npu_kv::swap_blocks_start.static", _start_static)

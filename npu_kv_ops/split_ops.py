"""The two halves of the operator: start the copies, and wait for them later.

``torch.ops.npu_kv.swap_blocks_start`` and ``torch.ops.npu_kv.swap_blocks_wait``. Between the two
the stream computes. The graph passes make them of ``swap_blocks_batch``; they can also be written
by hand, in eager code and in code that is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_kv_ops import ops

__all__ = ["swap_blocks_start", "swap_blocks_wait"]

_start = torch.ops.npu_kv.swap_blocks_start
_wait = torch.ops.npu_kv.swap_blocks_wait


def swap_blocks_start(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_blocks: torch.Tensor | Sequence[int],
    dst_blocks: torch.Tensor | Sequence[int],
    parts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Start to copy blocks, as :func:`npu_kv_ops.swap_blocks_batch` does, without waiting.

    The copies begin when the current stream of the tensors' NPU gets here; the stream goes on at
    once. From here to :func:`swap_blocks_wait` nobody may write the blocks of ``src`` or touch
    those of ``dst``; the operator keeps the tensors alive.

    Copies between an NPU and page-locked host memory overlap with what the stream does. All others
    (page-able memory, within an NPU or the host) are done, or ordered on the stream, when this
    returns; they have to be waited for all the same.

    Args:
        src, dst, src_blocks, dst_blocks: as for ``swap_blocks_batch``, also in a capture: ids on
            the NPU are read at every replay, lists of int are constants, CPU tensors are refused.
        parts: numbers of tensors, in order, that can be waited for one by one; they are copied in
            this order. None: one part.

    Returns:
        the ticket, a 0-d int64 CPU tensor. If it is freed while a part was not waited for, that is
        an error, raised by the next call on the NPU or by ``raise_pending_errors``.

    Raises:
        ValueError: ``parts`` are not positive or do not add up to the number of tensors; and what
            ``swap_blocks_batch`` raises. Safe from several threads.
    """
    try:
        if isinstance(src_blocks, torch.Tensor) or isinstance(dst_blocks, torch.Tensor):
            ticket: torch.Tensor = _start.default(src, dst, src_blocks, dst_blocks, parts)
        else:
            ticket = _start.static(src, dst, src_blocks, dst_blocks, parts)
    except RuntimeError:
        mistake = ops.mistake_in(src, dst, src_blocks, dst_blocks)
        if mistake is None:
            raise
        raise mistake from None
    return ticket


def swap_blocks_wait(
    ticket: torch.Tensor,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    part: int = 0,
) -> None:
    """Have the current stream wait until a part of a started swap is copied.

    Args:
        ticket: what :func:`swap_blocks_start` has returned. In a graph, start and wait belong to
            the same capture.
        src, dst: the tensors of the part, those that the start was given.
        part: number of the part, from 0. Each is waited for once.

    Raises:
        ValueError: no such ticket or part; the part was waited for before; other tensors.
        TransferError: the wait cannot be put on the stream, or belongs to another capture than the
            start (outside of captures raised by a later call). Safe from several threads.
    """
    _wait(ticket, src, dst, part)

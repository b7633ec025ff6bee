"""Drop-in for ``npu_mem_ops`` of vLLM-Ascend's simple KV offload: same names, same meaning.

Importing from here instead is the whole migration. Behind the names is
``torch.ops.npu_kv.swap_blocks_batch``: block ids are checked, neighbouring blocks become one copy,
and no table of addresses is built in Python. The contract is that of ``npu_mem_ops.py`` in
vllm-project/vllm-ascend (``vllm_ascend/simple_kv_offload``).

Importing this module loads torch and the libraries of the package; see :mod:`npu_kv_ops.runtime`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from npu_kv_ops import runtime

runtime.load()

import torch  # noqa: E402

from npu_kv_ops import ops  # noqa: E402

__all__ = [
    "DIRECTION_D2H",
    "DIRECTION_H2D",
    "BatchMemcpyParams",
    "BatchMemcpyWorkspace",
    "build_params",
    "copy_blocks",
]

DIRECTION_H2D = 0
DIRECTION_D2H = 1

_NAMES = {DIRECTION_H2D: "DIRECTION_H2D (0)", DIRECTION_D2H: "DIRECTION_D2H (1)"}


class BatchMemcpyParams(NamedTuple):
    """The tensors of one direction, checked once by :func:`build_params` and copied many times.

    ``src`` and ``dst`` are kept alive. ``bpb`` holds the payload bytes of a block, by tensor.
    """

    src: list[torch.Tensor]
    dst: list[torch.Tensor]
    bpb: list[int]
    num_sub_tensors: int
    direction: int

    @property
    def src_bases(self) -> list[int]:
        """The address of the first block of every source tensor."""
        return [tensor.data_ptr() for tensor in self.src]

    @property
    def dst_bases(self) -> list[int]:
        """The address of the first block of every destination tensor."""
        return [tensor.data_ptr() for tensor in self.dst]


class BatchMemcpyWorkspace:
    """Accepted by :func:`copy_blocks` for compatibility.

    The original keeps its address arrays here between calls. This module has no such arrays, and
    the buffers it does have belong to the operator, so the object is empty.
    """

    __slots__ = ()


def build_params(
    src_caches: Mapping[str, torch.Tensor],
    dst_caches: Mapping[str, torch.Tensor],
    direction: int,
) -> BatchMemcpyParams:
    """Check the tensors of a direction and return what :func:`copy_blocks` needs.

    Args:
        src_caches: name to tensor ``[num_blocks, block_bytes]``, of any dtype with a contiguous
            payload; all on the CPU (``DIRECTION_H2D``) or all on one NPU (``DIRECTION_D2H``).
        dst_caches: the same keys in the same order, on the other side. The number of blocks may
            differ.
        direction: ``DIRECTION_H2D`` or ``DIRECTION_D2H``. Tensors that are all on the CPU are taken
            with either, to try code on a machine without an NPU.

    Raises:
        ValueError: keys or their order differ, an unknown direction, devices that contradict it, or
            tensors that ``swap_blocks_batch`` refuses.
        TypeError: dtypes of a pair differ.
    """
    if direction not in _NAMES:
        raise ValueError(f"direction is {direction!r}; allowed are {' and '.join(_NAMES.values())}")
    if list(src_caches) != list(dst_caches):
        raise ValueError(
            "src_caches and dst_caches must have the same keys in the same order, got "
            f"{list(src_caches)} and {list(dst_caches)}"
        )
    src, dst = list(src_caches.values()), list(dst_caches.values())
    _check_devices("src_caches", src_caches, on_npu=direction == DIRECTION_D2H, other=dst)
    _check_devices("dst_caches", dst_caches, on_npu=direction == DIRECTION_H2D, other=src)
    # A call without ids runs all other checks and copies nothing.
    ops.swap_blocks_batch(src, dst, [], [])
    bpb = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in src]
    return BatchMemcpyParams(src, dst, bpb, len(src), direction)


def copy_blocks(
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    params: BatchMemcpyParams,
    workspace: BatchMemcpyWorkspace | None = None,
) -> None:
    """Copy block ``src_block_ids[i]`` to ``dst_block_ids[i]`` in every pair of tensors.

    Asynchronous on the current stream of the tensors' NPU, like ``swap_blocks_batch``, whose rules
    and errors apply: the copies of one call are unordered, ids out of range are an ``IndexError``,
    and a stream that captures a graph refuses the ids. Safe from several threads.

    Args:
        src_block_ids: blocks to read. The list may be changed after the call.
        dst_block_ids: blocks to write, as many.
        params: from :func:`build_params`.
        workspace: ignored.
    """
    if not len(src_block_ids) and not len(dst_block_ids):
        return
    torch.ops.npu_kv.swap_blocks_batch.default(
        params.src, params.dst, _ids(src_block_ids), _ids(dst_block_ids)
    )


def _ids(block_ids: Sequence[int]) -> torch.Tensor:
    # A quarter of the time of torch.tensor(list).
    ids = array("q", block_ids)
    return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)


def _check_devices(
    argument: str, caches: Mapping[str, torch.Tensor], *, on_npu: bool, other: list[torch.Tensor]
) -> None:
    wanted = "npu" if on_npu else "cpu"
    all_on_cpu = all(tensor.device.type == "cpu" for tensor in (*caches.values(), *other))
    for name, tensor in caches.items():
        if tensor.device.type != wanted and not all_on_cpu:
            raise ValueError(
                f"{argument}[{name!r}] is on {tensor.device}; the direction wants it on {wanted}"
            )

"""The operator in its plainest form, and pools of blocks, for the tests of the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Ids = Sequence[int]


def make_pool(
    blocks: int,
    payload: Sequence[int] = (6,),
    *,
    gap: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
    pin: bool = False,
) -> torch.Tensor:
    """A tensor ``[blocks, *payload]`` of random bytes with ``gap`` elements between its blocks.

    ``pin`` page-locks host memory; on an NPU the content arrives by a blocking copy.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(payload).numel()
    raw = torch.randint(
        0, 256, (blocks * (size + gap) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    if dtype is torch.bool:
        raw &= 1
    flat = raw.view(dtype)
    if pin:
        flat = flat.pin_memory()
    flat = flat.to(device)
    strides = [size + gap]
    for dim in range(len(payload)):
        strides.append(torch.Size(payload[dim + 1 :]).numel())
    return flat.as_strided((blocks, *payload), strides)


def content(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU of everything the tensors' storages hold, the gaps included, as bytes."""
    return [
        torch.empty(0, dtype=torch.uint8, device=tensor.device)
        .set_(tensor.untyped_storage())
        .cpu()
        .clone()
        for tensor in tensors
    ]


def expected_content(
    src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], src_ids: Ids, dst_ids: Ids
) -> list[torch.Tensor]:
    """What ``content(dst)`` must be after the copy, computed byte by byte on the CPU."""
    after = content(dst)
    for source, source_like, target, target_like in zip(content(src), src, after, dst, strict=True):
        _copy_blocks(source, source_like, target, target_like, src_ids, dst_ids)
    return after


def _copy_blocks(
    source: torch.Tensor,
    source_like: torch.Tensor,
    target: torch.Tensor,
    target_like: torch.Tensor,
    src_ids: Ids,
    dst_ids: Ids,
) -> None:
    item = target_like.element_size()
    payload = target_like[:1].numel() * item
    for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
        if src_id < 0 or dst_id < 0:
            continue
        begin = (source_like.storage_offset() + src_id * source_like.stride(0)) * item
        end = (target_like.storage_offset() + dst_id * target_like.stride(0)) * item
        target[end : end + payload] = source[begin : begin + payload]


def assert_same(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Every byte of every storage is as wanted."""
    assert len(actual) == len(wanted)
    for index, (one, other) in enumerate(zip(actual, wanted, strict=True)):
        wrong = (one != other).nonzero().flatten()
        assert wrong.numel() == 0, f"tensor {index}: bytes {wrong[:10].tolist()} differ"

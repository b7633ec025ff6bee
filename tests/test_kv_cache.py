"""block_views: every byte of every block exactly once, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_kv_ops import block_views, kv_cache

Caches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


class Blocks:
    """What a test says about one tensor: which slices of which dimension are a manager block."""

    def __init__(self, tensor: torch.Tensor, dim: int = 0, ratio: int = 1) -> None:
        self.tensor, self.dim, self.ratio = tensor, dim, ratio

    def of(self, block: int) -> torch.Tensor:
        return self.tensor.narrow(self.dim, block * self.ratio, self.ratio)

    def addresses(self, block: int) -> torch.Tensor:
        """Every byte address of a block, found element by element, without geometry."""
        piece = self.of(block)
        element = piece.element_size()
        indices = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(piece.shape, piece.stride(), strict=True):
            indices = indices[..., None] + torch.arange(size) * stride
        starts = piece.data_ptr() + indices.flatten() * element
        return (starts[:, None] + torch.arange(element)).flatten()


def check(views: Mapping[str, torch.Tensor], truth: Sequence[Blocks], num_blocks: int) -> None:
    """Compares views and caches byte by byte, by address and by what is written and read."""
    for name, view in views.items():
        assert view.dtype == torch.int8, name
        assert view.dim() == 2, name
        assert view.shape[0] == num_blocks, name
        assert view.stride(1) == 1, name
        assert view.stride(0) >= view.shape[1], name
        assert not view.requires_grad, name
        assert view.grad_fn is None, name

    owner: dict[int, int] = {}
    for block in range(num_blocks):
        viewed = torch.cat(
            [
                view.data_ptr() + block * view.stride(0) + torch.arange(view.shape[1])
                for view in views.values()
            ]
        )
        wanted = torch.cat([blocks.addresses(block) for blocks in truth]).unique()
        assert len(viewed.unique()) == len(viewed), f"block {block} lists bytes twice"
        assert torch.equal(viewed.sort().values, wanted), f"block {block}"
        for address in viewed.tolist():
            assert owner.setdefault(address, block) == block, "a byte of two blocks"

    storages = {b.tensor.untyped_storage().data_ptr(): b.tensor for b in truth}
    raw = {
        pointer: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        for pointer, tensor in storages.items()
    }
    for memory in raw.values():
        memory.zero_()
    for view in views.values():
        for block in range(num_blocks):
            view[block] = block + 1
    for block in range(num_blocks):
        for blocks in truth:
            seen = blocks.of(block).contiguous().view(torch.uint8)
            assert bool((seen == block + 1).all()), f"block {block} not written through the views"
    written = torch.cat([pointer + memory.nonzero()[:, 0] for pointer, memory in raw.items()])
    assert len(written.unique()) == len(owner)

    for memory in raw.values():
        memory.random_(0, 255)
    before = {name: view.clone() for name, view in views.items()}
    for blocks in truth:
        blocks.of(num_blocks - 1).zero_()
    for name, view in views.items():
        assert not bool(view[num_blocks - 1].any()), name
        assert torch.equal(view[: num_blocks - 1], before[name][: num_blocks - 1]), name


def geometry(views: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Payload and stride of every view."""
    return {name: (view.shape[1], view.stride(0)) for name, view in views.items()}


def buffer(size: int, spare: int = 0) -> torch.Tensor:
    return torch.zeros(size + spare, dtype=torch.int8)


def typed(raw: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of ``shape`` at a byte offset of a raw buffer."""
    size = math.prod(shape) * dtype.itemsize
    return raw[offset : offset + size].view(dtype).view(*shape)


# ------------------------------------------------------- upstream placement (KVCacheTensor)

N, HEADS, BLOCK, WIDTH = 7, 2, 16, 16  # K and V of 8 each, fused: a page is 1024 bytes in fp16


def place(
    layout: str,
    layers: int,
    *,
    blocks: int = N,
    heads: int = HEADS,
    tokens: int = BLOCK,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float16,
    offset: int = 0,
    spare: int = 0,
    stored: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Logical ``[B, H, N, C]`` tensors of ``layers`` layers in one buffer of a physical layout."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": width}
    shape = [sizes[axis] for axis in layout]
    if stored is None:
        stored = buffer(offset + math.prod(shape) * dtype.itemsize, spare)
    packed = typed(stored, offset, shape, dtype)
    order = [layout.index(axis) for axis in "LBHNC"]
    return list(packed.permute(order).unbind(0))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_layer_outermost_layers_share_one_storage(layout: str) -> None:
    caches = dict(zip("abc", place(layout, 3), strict=True))
    views = block_views(caches, N)
    assert geometry(views) == {"a": (1024, 1024), "b": (1024, 1024), "c": (1024, 1024)}
    base = views["a"].data_ptr()
    assert [view.data_ptr() - base for view in views.values()] == [0, 7168, 14336]
    check(views, [Blocks(t) for t in caches.values()], N)
    assert geometry(block_views(caches, N, 1024)) == geometry(views)


def test_head_outermost_gives_a_view_for_every_head() -> None:
    caches = dict(zip(["l0", "l1", "l2"], place("LHBNC", 3), strict=True))
    views = block_views(caches, N)
    assert geometry(views) == {f"l{i}.{h}": (512, 512) for i in range(3) for h in range(2)}
    check(views, [Blocks(t) for t in caches.values()], N)
    assert geometry(block_views(caches, N, 1024)) == geometry(views)
    assert geometry(block_views(caches, N, {"l0": [512, 512]})) == geometry(views)


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC", "BHLNC"])
def test_packed_block_is_one_view(layout: str) -> None:
    caches = dict(zip(["l0", "l1", "l2"], place(layout, 3), strict=True))
    views = block_views(caches, N)
    assert geometry(views) == {"l0": (3072, 3072)}
    check(views, [Blocks(t) for t in caches.values()], N)
    assert geometry(block_views(caches, N, 1024)) == geometry(views)


def test_packed_block_with_layers_in_another_order_is_named_for_the_first_given() -> None:
    l0, l1, l2 = place("BLNHC", 3)
    views = block_views({"l2": l2, "l0": l0, "l1": l1}, N)
    assert geometry(views) == {"l2": (3072, 3072)}
    check(views, [Blocks(t) for t in (l0, l1, l2)], N)


def test_packed_block_of_which_a_layer_is_missing_has_a_gap() -> None:
    l0, _, l2 = place("BLNHC", 3)
    views = block_views({"l0": l0, "l2": l2}, N)
    assert geometry(views) == {"l0": (1024, 3072), "l2": (1024, 3072)}
    check(views, [Blocks(l0), Blocks(l2)], N)
    with pytest.raises(ValueError, match=r"'l0', component 0: .*not contiguous"):
        block_views(dict(zip(["l0", "l1"], place("BHLNC", 3)[:2], strict=True)), N)


def test_kernel_blocks_that_split_a_manager_block() -> None:
    caches = dict(zip("ab", place("LBNHC", 2, blocks=14), strict=True))
    views = block_views(caches, N, page_bytes=2048)
    assert geometry(views) == {"a": (2048, 2048), "b": (2048, 2048)}
    check(views, [Blocks(t, ratio=2) for t in caches.values()], N)


def test_kernel_blocks_of_a_head_outermost_layer() -> None:
    (cache,) = place("LHBNC", 1, blocks=14)
    views = block_views({"a": cache}, N, page_bytes=2048)
    assert geometry(views) == {"a.0": (1024, 1024), "a.1": (1024, 1024)}
    check(views, [Blocks(cache, ratio=2)], N)


def test_kernel_blocks_look_like_spare_blocks_without_page_bytes() -> None:
    (cache,) = place("LBNHC", 1, blocks=14)
    with pytest.raises(ValueError, match=r"'a', component 0: shape \(14, .*pass page_bytes"):
        block_views({"a": cache}, N)
    spare = block_views({"a": cache}, N, page_bytes=1024)
    assert geometry(spare) == {"a": (1024, 1024)}
    check(spare, [Blocks(cache)], N)


def test_group_of_pages_of_different_size() -> None:
    stored = buffer(28672)
    caches = dict(zip("ab", place("LBNHC", 2, stored=stored), strict=True))
    caches["c"] = place("LBNHC", 1, width=32, stored=stored, offset=14336)[0]
    views = block_views(caches, N, {"a": 1024, "b": 1024, "c": 2048})
    assert geometry(views) == {"a": (1024, 1024), "b": (1024, 1024), "c": (2048, 2048)}
    check(views, [Blocks(t) for t in caches.values()], N)


def test_packed_pages_of_different_size_start_inside_the_block() -> None:
    stored = buffer(N * 4096).view(N, 4096)
    caches = {
        "a": stored[:, :1024].view(torch.float16).view(N, HEADS, BLOCK, WIDTH),
        "b": stored[:, 1024:2048].view(torch.float16).view(N, HEADS, BLOCK, WIDTH),
        "c": stored[:, 2048:].view(torch.float16).view(N, HEADS, BLOCK, 32),
    }
    views = block_views(caches, N, {"a": 1024, "b": 1024, "c": 2048})
    assert geometry(views) == {"a": (4096, 4096)}
    check(views, [Blocks(t) for t in caches.values()], N)


def test_groups_that_overlay_each_other_are_viewed_once() -> None:
    stored = buffer(3 * N * 1024)
    full = place("LBNHC", 2, stored=stored)
    sliding = place("LBNHC", 3, stored=stored)
    caches = {"f0": full[0], "f1": full[1], "s0": sliding[0], "s1": sliding[1], "s2": sliding[2]}
    views = block_views(caches, N)
    assert geometry(views) == {"f0": (1024, 1024), "f1": (1024, 1024), "s2": (1024, 1024)}
    check(views, [Blocks(t) for t in caches.values()], N)


def test_mla_has_no_split_and_an_indexer_keeps_its_own_size() -> None:
    stored = buffer(N * (18432 + 2112), spare=2000)
    latent = place("LBNHC", 1, heads=1, tokens=16, width=576, dtype=torch.bfloat16, stored=stored)
    index = place(
        "LBNHC",
        1,
        heads=1,
        tokens=16,
        width=132,
        dtype=torch.uint8,
        stored=stored,
        offset=N * 18432,
    )
    caches = {"mla": latent[0], "indexer": index[0]}
    views = block_views(caches, N, {"mla": 18432, "indexer": 2112})
    assert geometry(views) == {"mla": (18432, 18432), "indexer": (2112, 2112)}
    check(views, [Blocks(t) for t in caches.values()], N)


def test_mla_and_indexer_packed_are_one_view() -> None:
    stored = buffer(N * 20544).view(N, 20544)
    latent = stored[:, :18432].view(torch.bfloat16).view(N, 1, 16, 576)
    index = stored[:, 18432:].view(torch.uint8).view(N, 1, 16, 132)
    views = block_views({"mla": latent, "indexer": index}, N)
    assert geometry(views) == {"mla": (20544, 20544)}
    check(views, [Blocks(latent), Blocks(index)], N)


@pytest.mark.parametrize("mamba_first", [False, True])
def test_padded_mamba_page_at_the_address_of_an_attention_page(mamba_first: bool) -> None:
    stored = buffer(N * 1024)
    (attention,) = place("LBNHC", 1, stored=stored)
    mamba = stored.as_strided((N, 1, 1, 188), (1024, 188, 188, 1))
    caches = {"attention": attention, "mamba": mamba}
    if mamba_first:
        caches = dict(reversed(caches.items()))
    views = block_views(caches, N, page_bytes=1024)
    assert geometry(views) == {next(iter(caches)): (1024, 1024)}
    check(views, [Blocks(attention), Blocks(mamba)], N)
    alone = block_views({"mamba": mamba}, N, page_bytes=1024)
    assert geometry(alone) == {"mamba": (188, 1024)}
    check(alone, [Blocks(mamba)], N)


def test_same_address_with_another_block_stride_is_refused() -> None:
    stored = buffer(N * 1024)
    (attention,) = place("LHBNC", 1, stored=stored)
    mamba = stored.view(N, 1, 1, 1024)
    with pytest.raises(ValueError, match=r"share bytes: layer 'a'.*layer 'm'"):
        block_views({"a": attention, "m": mamba}, N)


def test_second_name_of_a_shared_layer_adds_nothing() -> None:
    (cache,) = place("LBNHC", 1)
    views = block_views({"a": cache, "shared": cache}, N)
    assert geometry(views) == {"a": (1024, 1024)}
    memory = np.zeros((N, 64), np.int8)
    twice = {"a": torch.from_numpy(memory), "b": torch.from_numpy(memory)}  # two storages
    assert list(block_views(twice, N)) == ["a"]


def test_neighbours_in_different_storages_are_not_joined() -> None:
    memory = np.zeros((N, 64), np.int8)
    left, right = torch.from_numpy(memory[:, :24]), torch.from_numpy(memory[:, 24:])
    views = block_views({"a": (left, right)}, N)
    assert geometry(views) == {"a.0": (24, 64), "a.1": (40, 64)}
    check(views, [Blocks(left), Blocks(right)], N)
    across = torch.from_numpy(memory[:, 16:32])
    with pytest.raises(ValueError, match="share bytes"):
        block_views({"a": left, "b": across}, N)


def test_raw_buffer_handed_over_under_every_name() -> None:
    raw = buffer(N * 3072, spare=1024)
    views = block_views({"a": raw, "b": raw}, N, page_bytes=3072)
    assert geometry(views) == {"a": (3072, 3072)}
    check(views, [Blocks(raw, ratio=3072)], N)


# ---------------------------------------------------------------- what vLLM-Ascend registers


def test_k_and_v_in_separate_allocations() -> None:
    k, v = torch.zeros(N, 16, 2, 8), torch.zeros(N, 16, 2, 4)
    views = block_views({"a": (k, v), "b": [v.clone()]}, N)
    assert geometry(views) == {"a.0": (1024, 1024), "a.1": (512, 512), "b": (512, 512)}
    check(block_views({"a": (k, v)}, N, 1536), [Blocks(k), Blocks(v)], N)
    check(block_views({"a": (k, v)}, N, {"a": (1024, 512)}), [Blocks(k), Blocks(v)], N)


def test_allocation_larger_than_the_cache_with_an_aligned_start() -> None:
    align = 4096
    parts = []
    for width in (8, 4):
        raw = buffer(N * 16 * 2 * width * 2, spare=align)
        start = -raw.data_ptr() % align
        parts.append(typed(raw, start, (N, 16, 2, width), torch.float16))
    views = block_views({"a": tuple(parts)}, N, 768)
    assert geometry(views) == {"a.0": (512, 512), "a.1": (256, 256)}
    assert all(view.data_ptr() % align == 0 for view in views.values())
    check(views, [Blocks(t) for t in parts], N)


def test_allocation_with_more_blocks_than_the_manager_uses() -> None:
    cache = torch.zeros(N + 3, 16, 8)
    check(block_views({"a": cache}, N), [Blocks(cache)], N)


def test_latent_and_rope_have_different_sizes() -> None:
    latent = torch.zeros(N, 16, 1, 512, dtype=torch.bfloat16)
    rope = torch.zeros(N, 16, 1, 64, dtype=torch.bfloat16)
    views = block_views({"a": (latent, rope)}, N, 16384 + 2048)
    assert geometry(views) == {"a.0": (16384, 16384), "a.1": (2048, 2048)}
    check(views, [Blocks(latent), Blocks(rope)], N)


def test_indexer_keys_and_scales_in_one_allocation() -> None:
    raw = buffer(N * (2048 + 32) + 100)
    k = typed(raw, 0, (N, 16, 1, 128), torch.int8)
    scale = typed(raw, N * 2048, (N, 16, 1, 1), torch.float16)
    views = block_views({"x": (k, scale), "y": (k,)}, N)
    assert geometry(views) == {"x.0": (2048, 2048), "x.1": (32, 32)}
    check(views, [Blocks(k), Blocks(scale)], N)


@pytest.mark.parametrize("full_view", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
def test_strided_views_into_one_page(full_view: bool, ratio: int) -> None:
    count, page = N * ratio, 2048 + 32
    raw = buffer(count * page).view(count, page)
    k = raw[:, :2048].view(count, 16, 1, 128)
    scale = raw[:, 2048:].view(torch.float16).view(count, 16, 1, 1)
    parts = [k, scale, raw] if full_view else [k, scale]
    views = block_views({"a": parts}, N, page_bytes=page * ratio)
    assert geometry(views) == {"a": (page * ratio, page * ratio)}
    check(views, [Blocks(t, ratio=ratio) for t in parts], N)


def test_kernel_blocks_with_padding_between_them_are_refused() -> None:
    raw = buffer(2 * N * 128).view(2 * N, 128)
    with pytest.raises(ValueError, match=r"'a', component 0.*2 kernel blocks.*100 bytes every 128"):
        block_views({"a": raw[:, :100]}, N, page_bytes=256)


def test_full_view_over_parts_of_a_padded_page() -> None:
    raw = buffer(N * 256).view(N, 256)
    parts = [raw[:, :64], raw[:, 96:128], raw[:, :128]]
    views = block_views({"a": parts}, N, page_bytes=256)
    assert geometry(views) == {"a": (128, 256)}
    check(views, [Blocks(t) for t in parts], N)


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_stacked_k_and_v(num_blocks: int) -> None:
    cache = torch.zeros(2, num_blocks, 16, 4)
    views = block_views({"a": cache}, num_blocks)
    assert geometry(views) == {"a.0": (256, 256), "a.1": (256, 256)}
    check(views, [Blocks(cache, dim=1)], num_blocks)
    assert geometry(block_views({"a": cache}, num_blocks, 512)) == geometry(views)


def test_stacked_k_and_v_in_kernel_blocks() -> None:
    cache = torch.zeros(2, 3 * N, 16, 4)
    views = block_views({"a": cache}, N, page_bytes=2 * 3 * 256)
    assert geometry(views) == {"a.0": (768, 768), "a.1": (768, 768)}
    check(views, [Blocks(cache, dim=1, ratio=3)], N)


def test_stacked_raw_buffers() -> None:
    raw = torch.zeros(2, N * 64 + 5, dtype=torch.int8)
    views = block_views({"a": raw}, N, page_bytes=128)
    assert geometry(views) == {"a.0": (64, 64), "a.1": (64, 64)}
    check(views, [Blocks(raw, dim=1, ratio=64)], N)


def test_stacked_shape_over_interleaved_memory_is_one_view() -> None:
    cache = torch.zeros(N, 2, 16, 4).transpose(0, 1)
    views = block_views({"a": cache}, N)
    assert geometry(views) == {"a": (512, 512)}
    check(views, [Blocks(cache, dim=1)], N)


def test_two_by_two_is_two_blocks_unless_page_bytes_names_planes() -> None:
    cache = torch.zeros(2, 2, 16, 4)
    for page in (None, 512, {"a": [512]}):
        views = block_views({"a": cache}, 2, page)
        assert geometry(views) == {"a": (512, 512)}
        check(views, [Blocks(cache)], 2)
    planes = block_views({"a": cache}, 2, {"a": [256, 256]})
    assert geometry(planes) == {"a.0": (256, 256), "a.1": (256, 256)}
    check(planes, [Blocks(cache, dim=1)], 2)


def test_two_blocks_in_a_pool_of_one_follow_page_bytes() -> None:
    cache = torch.zeros(2, 1, 16, 4)
    check(block_views({"a": cache}, 1, page_bytes=256), [Blocks(cache)], 1)
    check(block_views({"a": cache}, 1, page_bytes=512), [Blocks(cache, dim=1)], 1)


def test_mamba_states_follow_each_other_in_one_buffer() -> None:
    raw = buffer(N * (96 + 512) + 1000)
    conv = typed(raw, 0, (N, 3, 16), torch.float16)
    ssm = typed(raw, N * 96, (N, 2, 8, 8), torch.float32)
    views = block_views({"m": [conv, ssm]}, N, {"m": [96, 512]})
    assert geometry(views) == {"m.0": (96, 96), "m.1": (512, 512)}
    check(views, [Blocks(conv), Blocks(ssm)], N)


@pytest.mark.parametrize("ratio", [1, 4])
def test_hybrid_buffer_of_mamba_and_attention(ratio: int) -> None:
    # First the convolution states, then K over the memory of the SSM states, then V.
    raw = buffer(N * (96 + 512 + 512))
    conv = typed(raw, 0, (N, 3, 16), torch.float16)
    ssm = typed(raw, N * 96, (N, 2, 8, 8), torch.float32)
    k = typed(raw, N * 96, (N * ratio, 16 // ratio, 2, 8), torch.float16)
    v = typed(raw, N * (96 + 512), (N * ratio, 16 // ratio, 2, 8), torch.float16)
    views = block_views({"attn": (k, v), "mamba": [conv, ssm]}, N, {"attn": 1024, "mamba": 608})
    assert geometry(views) == {"attn.0": (512, 512), "attn.1": (512, 512), "mamba.0": (96, 96)}
    check(views, [Blocks(k, ratio=ratio), Blocks(v, ratio=ratio), Blocks(conv), Blocks(ssm)], N)


def test_only_one_of_the_tensors_is_split() -> None:
    k = torch.zeros(2 * N, 8, 8)
    scale = torch.zeros(N, 16)
    views = block_views({"a": (k, scale)}, N, page_bytes=512 + 64)
    assert geometry(views) == {"a.0": (512, 512), "a.1": (64, 64)}
    check(views, [Blocks(k, ratio=2), Blocks(scale)], N)


def test_page_bytes_that_fit_two_ways_ask_for_sizes() -> None:
    k, v = torch.zeros(2 * N, 64), torch.zeros(2 * N, 64)
    with pytest.raises(ValueError, match=r"more than one way.*one size a tensor"):
        block_views({"a": (k, v)}, N, page_bytes=256 * 3)
    views = block_views({"a": (k, v)}, N, {"a": [512, 256]})
    check(views, [Blocks(k, ratio=2), Blocks(v)], N)


def test_kernel_blocks_with_spare_ones_after_them() -> None:
    cache = torch.zeros(2 * N + 1, 16, 4)
    views = block_views({"a": cache}, N, page_bytes=512)
    check(views, [Blocks(cache, ratio=2)], N)


# ----------------------------------------------------------------------------- refusals


def test_missing_plane_is_noticed_by_page_bytes() -> None:
    k = torch.zeros(N, 16, 2, 8)
    message = (
        r"layer 'a', component 0: shape \(7, 16, 2, 8\), strides .*2048 page_bytes.*1024 bytes"
    )
    with pytest.raises(ValueError, match=message):
        block_views({"a": (k,)}, N, page_bytes=2048)
    with pytest.raises(ValueError, match="page_bytes"):
        block_views({"a": (k, k.clone())}, N, page_bytes=1024)
    raw = buffer(N * 128).view(N, 128)
    with pytest.raises(ValueError, match="page_bytes"):  # both are in one page: not two of them
        block_views({"a": (raw[:, :64], raw[:, 64:])}, N, page_bytes=256)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (torch.zeros(N - 1, 16), "fewer blocks than the 7"),
        (torch.zeros(2, N - 1, 16), "fewer blocks than the 7"),
        (torch.zeros(2, N + 1, 16), "fewer blocks than the 7"),
        (
            torch.zeros(3, N, 16),
            "fewer blocks than the 7 asked for; allowed are (blocks, ...), (2, blocks, ...), and "
            "with page_bytes any (planes, blocks, ...)",
        ),
        (torch.zeros(N, 16, 8)[:, :, :4], "not contiguous"),
        (torch.zeros(N, 4, 16, 8)[:, :, :8], "not contiguous"),
        (torch.zeros(16, N).t(), "not contiguous"),
        (torch.zeros(16, 8, N).permute(2, 1, 0), "not contiguous"),
        (torch.zeros(N, 1, 16).expand(N, 4, 16), "expanded"),
        (torch.zeros(1, 16).expand(N, 16), "blocks overlap"),
        (torch.zeros(64).as_strided((N, 8), (4, 1)), "blocks overlap"),
        (torch.zeros(N, 0), "holds no blocks"),
        (torch.zeros(()), "holds no blocks"),
        (torch.zeros(N, 4).to_sparse(), "strided"),
        (torch.zeros(N, 4, device="meta"), "strided"),
    ],
)
@pytest.mark.parametrize("page", [None, 123456])
def test_tensor_that_has_no_block_view(cache: torch.Tensor, reason: str, page: int | None) -> None:
    good = torch.zeros(N, 4)
    pattern = r"layer 'bad', component 1: shape \(.*strides \(.*" if not cache.is_sparse else "bad"
    with pytest.raises(ValueError, match=pattern) as error:
        block_views({"good": good, "bad": (good, cache)}, N, {"bad": page})
    if page is None:
        assert reason in str(error.value)


def test_blocks_of_two_layers_that_interlock_are_refused() -> None:
    raw = buffer(1000)
    one = raw.as_strided((N, 64), (64, 1))
    shifted = raw.as_strided((N, 64), (64, 1), 32)
    with pytest.raises(ValueError, match=r"share bytes: layer 'a'.*layer 'b'"):
        block_views({"a": one, "b": shifted}, N)
    later = raw.as_strided((N, 32), (64, 1), 64 * 3)  # block 0 is block 3 of the other
    with pytest.raises(ValueError, match="share bytes"):
        block_views({"a": one, "b": later}, N)
    end = raw.as_strided((N, 40), (64, 1), 2 * 64 + 32)  # its end is in the next block of the other
    with pytest.raises(ValueError, match="share bytes"):
        block_views({"a": raw.as_strided((N, 16), (64, 1)), "b": end}, N)
    other_stride = raw.as_strided((N, 8), (80, 1), 60)
    with pytest.raises(ValueError, match="share bytes"):
        block_views({"a": one, "b": other_stride}, N)
    wide, narrow = raw.as_strided((N, 8), (100, 1)), raw.as_strided((N, 8), (30, 1), 10)
    with pytest.raises(ValueError, match="share bytes"):
        block_views({"a": wide, "b": narrow}, N)


def test_shared_bytes_are_found_past_other_tensors_in_between() -> None:
    raw = buffer(2000)
    one = raw.as_strided((N, 16), (256, 1))
    between = raw.as_strided((N, 16), (32, 1), 16)
    meeting = raw.as_strided((N, 16), (128, 1), 512)
    assert len(block_views({"one": one, "between": between[:4]}, 4)) == 2
    with pytest.raises(ValueError, match=r"share bytes: layer 'one'.*layer 'meeting'"):
        block_views({"one": one[:4], "between": between[:4], "meeting": meeting[:4]}, 4)


def test_interleaved_blocks_of_different_stride_that_never_meet_are_accepted() -> None:
    raw = buffer(2000)
    one = raw.as_strided((N, 16), (64, 1))
    other = raw.as_strided((N, 16), (128, 1), 32)
    check(block_views({"a": one, "b": other}, N), [Blocks(one), Blocks(other)], N)


def test_views_come_in_the_order_of_the_caches() -> None:
    raw = buffer(N * 64 * 3)
    last, middle, first = (typed(raw, i * N * 64, (N, 16), torch.float32) for i in (2, 1, 0))
    split = torch.zeros(2 * N, 8)
    caches = {"z": last, "s": split, "y": first, "x": middle}
    views = block_views(caches, N, page_bytes=64)
    assert list(views) == ["z", "s", "y", "x"]
    check(views, [Blocks(last), Blocks(split, ratio=2), Blocks(first), Blocks(middle)], N)


def test_kernel_blocks_of_two_layers_in_one_page() -> None:
    raw = buffer(2 * N * 80).view(2 * N, 80)
    caches = {"k": raw[:, :64], "scale": raw[:, 64:]}
    truth = [Blocks(t, ratio=2) for t in caches.values()]
    for page in (160, {"k": 128, "scale": 32}):
        views = block_views(caches, N, page)
        assert geometry(views) == {"k": (160, 160)}
        check(views, truth, N)


def test_payloads_that_add_up_to_the_page_win_over_a_stride_that_equals_it() -> None:
    raw = buffer(2 * N * 128).view(2 * N, 128)
    caches = {"k": raw[:, :64], "v": raw[:, 64:]}
    views = block_views(caches, N, page_bytes=128)
    assert geometry(views) == {"k": (256, 256)}
    check(views, [Blocks(t, ratio=2) for t in caches.values()], N)
    with pytest.raises(ValueError, match="2 kernel blocks make a manager block"):
        block_views({"k": caches["k"]}, N, page_bytes=128)


def test_stride_of_a_single_block_means_nothing() -> None:
    raw = buffer(64)
    for stride in (0, 1, 1000):
        cache = raw.as_strided((1, 16), (stride, 1))
        views = block_views({"a": cache}, 1)
        check(views, [Blocks(cache)], 1)
    overlapping = [raw.as_strided((1, 16), (1, 1)), raw.as_strided((1, 16), (1, 1), 8)]
    views = block_views({"a": overlapping}, 1)
    assert geometry(views) == {"a": (24, 24)}
    check(views, [Blocks(t) for t in overlapping], 1)


def test_result_is_checked_against_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = kv_cache._merge
    caches = {"a": (torch.zeros(N, 4), torch.zeros(N, 8))}
    monkeypatch.setattr(kv_cache, "_merge", lambda *args: merge(*args)[:-1])
    with pytest.raises(ValueError, match="exactly once"):
        block_views(caches, N)
    monkeypatch.setattr(kv_cache, "_merge", lambda *args: 2 * merge(*args)[:1])
    with pytest.raises(ValueError, match=r"exactly once|share bytes"):
        block_views(caches, N)


def test_names_that_collide() -> None:
    k = torch.zeros(N, 4)
    with pytest.raises(ValueError, match=r"'a\.0'"):
        block_views({"a": (k, k.clone()), "a.0": k.clone()}, N)


@pytest.mark.parametrize(
    ("caches", "num_blocks", "page", "kind", "text"),
    [
        ([torch.zeros(4, 4)], 4, None, TypeError, "kv_caches"),
        ({"a": None}, 4, None, TypeError, "layer 'a'"),
        ({"a": (torch.zeros(4, 4), None)}, 4, None, TypeError, "layer 'a', component 1"),
        ({"a": ()}, 4, None, ValueError, "layer 'a'"),
        ({"a": torch.zeros(4, 4)}, 0, None, ValueError, "num_blocks must be at least 1, got 0"),
        ({"a": torch.zeros(4, 4)}, 4.0, None, TypeError, "num_blocks"),
        ({"a": torch.zeros(4, 4)}, True, None, TypeError, "num_blocks"),
        ({"a": torch.zeros(4, 4)}, 4, 0, ValueError, "page_bytes"),
        ({"a": torch.zeros(4, 4)}, 4, "16", TypeError, "page_bytes"),
        ({"a": torch.zeros(4, 4)}, 4, {"b": 16}, ValueError, "'b'"),
        ({"a": torch.zeros(4, 4)}, 4, {"a": -1}, ValueError, "'a'"),
        ({"a": torch.zeros(4, 4)}, 4, {"a": [16, 0]}, ValueError, "'a'"),
        ({"a": [torch.zeros(4, 4)] * 2}, 4, {"a": [16] * 3}, ValueError, "3 sizes"),
        ({"a": torch.zeros(4, 4)}, 4, {"a": [8, 8]}, ValueError, "2 sizes"),
    ],
)
def test_bad_arguments(
    caches: object, num_blocks: object, page: object, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        block_views(caches, num_blocks, page)  # type: ignore[arg-type]


def test_nothing_to_view() -> None:
    assert block_views({}, 4) == {}


def test_layer_without_page_bytes_is_taken_as_it_is() -> None:
    k = torch.zeros(N, 4)
    assert list(block_views({"a": k, "b": k.clone()}, N, {"a": 16, "b": None})) == ["a", "b"]
    assert list(block_views({"a": k, "b": k.clone()}, N, {"a": 16})) == ["a", "b"]


# ------------------------------------------------------------------ tensors of unusual modes


def test_views_keep_clear_of_autograd_and_inference_mode() -> None:
    with torch.inference_mode():
        cache = torch.zeros(N, 4)
        views = block_views({"a": cache}, N)
    assert not views["a"].is_inference()
    views["a"][1] = 5
    assert bool((cache[1].view(torch.int8) == 5).all())
    leaf = torch.zeros(N, 4, requires_grad=True)
    view = block_views({"a": leaf}, N)["a"]
    assert not view.requires_grad
    assert view.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()


def test_default_device_does_not_matter() -> None:
    cache = torch.zeros(N, 4)
    with torch.device("meta"):
        assert block_views({"a": cache}, N)["a"].device == cache.device


# --------------------------------------------------------------------------------- any geometry

LAYOUTS = ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DTYPES = [torch.int8, torch.float16, torch.float32]
few = st.integers(1, 3)


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    layers=few,
    blocks=st.integers(2, 5),
    ratio=few,
    heads=few,
    tokens=st.integers(2, 4),
    width=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 3),
    spare=st.integers(0, 40),
)
def test_upstream_placement(
    layout: str,
    layers: int,
    blocks: int,
    ratio: int,
    heads: int,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    offset: int,
    spare: int,
) -> None:
    # Kernel blocks are split only where a manager block stays contiguous.
    ratio = ratio if layout[0] == "L" else 1
    tensors = place(
        layout,
        layers,
        blocks=blocks * ratio,
        heads=heads,
        tokens=tokens,
        width=width,
        dtype=dtype,
        offset=offset * dtype.itemsize,
        spare=spare,
    )
    page = ratio * heads * tokens * width * dtype.itemsize
    views = block_views({f"l{i}": t for i, t in enumerate(tensors)}, blocks, page_bytes=page)
    check(views, [Blocks(t, ratio=ratio) for t in tensors], blocks)
    if layout[0] == "B":
        assert list(views) == ["l0"]
    elif layout == "LHBNC" and heads > 1:
        assert len(views) == layers * heads
    else:
        assert len(views) == layers


@st.composite
def component_lists(draw: st.DrawFn) -> tuple[list[Blocks], int, list[int]]:
    """Tuples as vLLM-Ascend makes them: sub-ranges of a raw buffer, split, padded or over-large."""
    blocks = draw(st.integers(1, 5))
    plan = []
    cursor = draw(st.integers(0, 2)) * 8
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        ratio = draw(few)
        inner = (draw(few), draw(st.integers(2, 4)))
        payload = math.prod(inner) * dtype.itemsize
        padding = draw(st.sampled_from([0, 0, 8])) if ratio == 1 else 0
        stride = payload + padding * dtype.itemsize
        count = blocks * ratio + draw(st.sampled_from([0, 0, 1]))
        cursor = -(-cursor // dtype.itemsize) * dtype.itemsize
        plan.append((dtype, ratio, inner, stride, count, cursor))
        cursor += count * stride + draw(st.integers(0, 9))
    raw = buffer(cursor + 16)
    truth, sizes = [], []
    for dtype, ratio, inner, stride, count, start in plan:
        element = dtype.itemsize
        flat = raw[start : start + count * stride].view(dtype)
        tensor = flat.as_strided(
            (count, *inner), (stride // element, inner[1], 1), flat.storage_offset()
        )
        truth.append(Blocks(tensor, ratio=ratio))
        sizes.append(ratio * math.prod(inner) * element)
    return truth, blocks, sizes


@settings(max_examples=150, deadline=None)
@given(component_lists())
def test_lists_of_components(case: tuple[list[Blocks], int, list[int]]) -> None:
    truth, blocks, sizes = case
    views = block_views({"a": [b.tensor for b in truth]}, blocks, {"a": sizes})
    check(views, truth, blocks)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(list(permutations(range(4)))),
    sizes=st.lists(st.integers(2, 4), min_size=4, max_size=4),
    blocks=st.integers(2, 4),
)
def test_any_permutation_is_viewed_exactly_or_refused(
    order: tuple[int, ...], sizes: list[int], blocks: int
) -> None:
    memory = [sizes[dim] for dim in order]
    memory[order.index(0)] = blocks
    inverse = [order.index(dim) for dim in range(4)]
    cache = torch.zeros(memory, dtype=torch.float16).permute(inverse)
    assert cache.shape[0] == blocks
    try:
        views = block_views({"a": cache}, blocks)
    except ValueError as error:
        assert "not contiguous" in str(error)  # noqa: PT017
        assert order[-1] == 0  # the next element in memory is always another block's
        return
    check(views, [Blocks(cache)], blocks)
    assert len(views) == math.prod(memory[: order.index(0)])

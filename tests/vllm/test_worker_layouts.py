"""Every layout of the KV cache: blocks go out and come back elsewhere, every byte compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from worker_pools import Layout, Memory, Part, config_of, rank_on, typed, upstream

from npu_kv_ops.integrations.vllm import NpuKVOffloadWorker

N = 7
HALF = torch.float16
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=HALF)
PAGE = ATTENTION.page_size_bytes
assert PAGE == 1024
LAYERS = ["l0", "l1", "l2"]

DEVICES = pytest.mark.parametrize("device", ["cpu", "npu:0"])


def check_round_trip(layout: Layout) -> None:
    """Stores some blocks, overwrites all of the device, loads them elsewhere, compares."""
    rank = rank_on(layout, host_blocks=N + 2)
    worker = rank.worker
    assert worker.num_cpu_blocks == N + 2
    assert len(worker.gpu_kv_caches) == layout.regions
    assert sum(view.shape[1] for view in worker.gpu_kv_caches.values()) == layout.block_bytes

    out, host, back = [1, 2, 3, 6], [8, 7, 1, 4], [5, 1, 6, 2]
    memory = layout.memory
    stored = memory.fill(seed=1)
    rank.store(out, host)
    assert all(map(torch.equal, memory.read(), stored)), "a store wrote to the device"
    scrambled = memory.fill(seed=2)
    rank.load(host, back)
    loaded = memory.read()

    for index, part in enumerate(layout.parts):
        for source, target in zip(out, back):
            got = part.of(loaded, memory, target)
            assert torch.equal(got, part.of(stored, memory, source)), f"part {index}, {target}"
        for block in set(range(N)) - set(back):
            got = part.of(loaded, memory, block)
            assert torch.equal(got, part.of(scrambled, memory, block)), f"part {index}, {block}"
    worker.shutdown()


# ------------------------------------------------------------------------------------- upstream


def dense(device: str, layout: str, regions: int) -> Layout:
    return upstream(device, layout, [(LAYERS, ATTENTION)], num_blocks=N, regions=regions)


def split(device: str) -> Layout:
    spec = replace(ATTENTION, block_size=32)
    return upstream(
        device,
        "LBHNC",
        [(["l0", "l1"], spec)],
        num_blocks=N,
        regions=2,
        kernel_block_sizes=[16],
    )


def uniform(device: str, layout: str, regions: int) -> Layout:
    wide = replace(ATTENTION, head_size=16)
    specs = {"l0": ATTENTION, "l1": ATTENTION, "l2": wide}
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return upstream(device, layout, [(LAYERS, group)], num_blocks=N, regions=regions)


def full_and_sliding(device: str) -> Layout:
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=HALF, sliding_window=32
    )
    groups = [(["f0", "f1"], ATTENTION), (["s0", "s1", "s2"], sliding)]
    return upstream(device, "LBNHC", groups, num_blocks=N, regions=3)


MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def mla(device: str) -> Layout:
    return upstream(device, "LBNHC", [(["m0", "m1"], MLA)], num_blocks=N, regions=2)


def mla_with_indexer(device: str, layout: str, regions: int) -> Layout:
    specs = {"m0": MLA, "m1": MLA, "i0": INDEXER, "i1": INDEXER}
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return upstream(device, layout, [(list(specs), group)], num_blocks=N, regions=regions)


MAMBA = MambaSpec(
    block_size=16, shapes=((3, 10), (4, 8)), dtypes=(HALF, torch.float32), page_size_padded=PAGE
)


def attention_and_padded_mamba(device: str) -> Layout:
    groups = [(["a0"], ATTENTION), (["m0"], MAMBA)]
    return upstream(device, "LBNHC", groups, num_blocks=N, regions=1)


UPSTREAM: dict[str, Callable[[str], Layout]] = {
    "LBNHC": lambda device: dense(device, "LBNHC", 3),
    "LBHNC": lambda device: dense(device, "LBHNC", 3),
    "LHBNC": lambda device: dense(device, "LHBNC", 6),
    "BLNHC": lambda device: dense(device, "BLNHC", 1),
    "BLHNC": lambda device: dense(device, "BLHNC", 1),
    "BHLNC": lambda device: dense(device, "BHLNC", 1),
    "kernel blocks": split,
    "pages of two sizes": lambda device: uniform(device, "LBNHC", 3),
    "pages of two sizes, packed": lambda device: uniform(device, "BLNHC", 1),
    "groups over each other": full_and_sliding,
    "MLA": mla,
    "MLA and indexer": lambda device: mla_with_indexer(device, "LBNHC", 4),
    "MLA and indexer, packed": lambda device: mla_with_indexer(device, "BLHNC", 1),
    "attention and Mamba": attention_and_padded_mamba,
}


@DEVICES
@pytest.mark.parametrize("layout", UPSTREAM)
def test_upstream(layout: str, device: str) -> None:
    check_round_trip(UPSTREAM[layout](device))


def test_a_layer_that_shares_a_cache_is_copied_once() -> None:
    layout = split("cpu")
    layout.caches["l0.shared"] = layout.caches["l0"]  # a second name, which the config has not
    check_round_trip(layout)


def test_a_buffer_that_is_registered_whole_is_viewed_by_its_placement() -> None:
    memory = Memory("cpu")
    raw = memory.allocate(64 + 2 * N * 96)
    spec = HiSparseHotSpec(block_size=16, page_size=80, blocks_per_request=1)
    config = config_of(N, [(["h0", "h1"], spec)], raw.numel())
    config.kv_cache_tensors = [
        KVCacheTensor(raw.numel(), ["h0", "h1"], layer_stride=N * 96, block_stride=96, offset=64)
    ]
    pages = [typed(raw, 64 + i * N * 96, (N, 80), torch.int8, (96, 1)) for i in range(2)]
    layout = Layout(memory, {"h0": raw, "h1": raw}, config, [Part(p) for p in pages], 2, 160)
    check_round_trip(layout)


# --------------------------------------------------------------------------------------- Ascend
# In the way in which vLLM-Ascend's model runner allocates and divides its caches.


def aligned(memory: Memory, size: int) -> tuple[torch.Tensor, int]:
    """An allocation with room to spare on both sides, and where the cache begins in it."""
    return memory.allocate(256 + size + 1000), 256


def separate_k_and_v(device: str) -> Layout:
    memory = Memory(device)
    caches, parts = {}, []
    for layer in ("l0", "l1"):
        pair = []
        for _ in range(2):
            raw, start = aligned(memory, N * PAGE // 2)
            pair.append(typed(raw, start, (N, 16, 2, 8), HALF))
        caches[layer] = tuple(pair)
        parts += [Part(t) for t in pair]
    config = config_of(N, [(list(caches), ATTENTION)], N * PAGE)
    return Layout(memory, caches, config, parts, 4, 2 * PAGE)


def spare_blocks(device: str) -> Layout:
    """A rank with room for twice the blocks that the scheduler hands out."""
    memory = Memory(device)
    pair = tuple(
        typed(memory.allocate(2 * N * PAGE // 2), 0, (2 * N, 16, 2, 8), HALF) for _ in range(2)
    )
    config = config_of(N, [(["l0"], ATTENTION)], N * PAGE)
    return Layout(memory, {"l0": pair}, config, [Part(t) for t in pair], 2, PAGE)


def latent_and_rope(device: str) -> Layout:
    memory = Memory(device)
    parts = []
    for width in (512, 64):
        raw, start = aligned(memory, N * 16 * width * 2)
        parts.append(typed(raw, start, (N, 16, 1, width), torch.bfloat16))
    config = config_of(N, [(["m0"], MLA)], N * MLA.page_size_bytes)
    return Layout(
        memory, {"m0": tuple(parts)}, config, [Part(t) for t in parts], 2, MLA.page_size_bytes
    )


# 128 int8 keys and one half as their scale, a token.
SCALED = MLAAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=128, dtype=torch.int8, state_content_bytes=130
)


def kernel_blocks(device: str) -> Layout:
    """Manager blocks of 32 tokens, kernels that take 16."""
    memory = Memory(device)
    spec = replace(ATTENTION, block_size=32)
    pair = []
    for _ in range(2):
        raw, start = aligned(memory, 2 * N * PAGE // 2)
        pair.append(typed(raw, start, (2 * N, 16, 2, 8), HALF))
    config = config_of(N, [(["l0"], spec)], N * 2 * PAGE)
    return Layout(
        memory, {"l0": tuple(pair)}, config, [Part(t, ratio=2) for t in pair], 2, 2 * PAGE
    )


def indexer_key_and_scale(device: str) -> Layout:
    """The keys of the indexer and their scales, one behind the other in one allocation."""
    memory = Memory(device)
    raw, start = aligned(memory, N * 16 * 130)
    key = typed(raw, start, (N, 16, 1, 128), torch.int8)
    scale = typed(raw, start + N * 16 * 128, (N, 16, 1, 1), HALF)
    config = config_of(N, [(["i0"], SCALED)], N * SCALED.page_size_bytes)
    return Layout(
        memory, {"i0": (key, scale)}, config, [Part(key), Part(scale)], 2, SCALED.page_size_bytes
    )


def strided_views_into_a_page(device: str) -> Layout:
    """Keys, scales, and on some products a view over both, in one page."""
    memory = Memory(device)
    page = SCALED.page_size_bytes
    raw, start = aligned(memory, N * page)
    key = typed(raw, start, (N, 16, 1, 128), torch.int8, (page, 128, 128, 1))
    scale = typed(raw, start + 16 * 128, (N, 16, 1, 1), HALF, (page // 2, 1, 1, 1))
    both = typed(raw, start, (N, 16, 1, 130), torch.int8, (page, 130, 130, 1))
    config = config_of(N, [(["c0"], SCALED)], N * page)
    return Layout(memory, {"c0": [key, scale, both]}, config, [Part(both)], 1, page)


def stacked(device: str) -> Layout:
    memory = Memory(device)
    cache = typed(memory.allocate(N * PAGE), 0, (2, N, 16, 2, 8), HALF)
    config = config_of(N, [(["cache_only_layers.0"], ATTENTION)], N * PAGE)
    caches = {"cache_only_layers.0": cache}
    return Layout(memory, caches, config, [Part(cache, dim=1)], 2, PAGE)


CONV, SSM = 3 * 16 * 2, 2 * 8 * 8 * 4
STATES = MambaSpec(block_size=16, shapes=((3, 16), (2, 8, 8)), dtypes=(HALF, torch.float32))


def mamba_states(device: str) -> Layout:
    """All convolution states, behind them all SSM states."""
    memory = Memory(device)
    raw, start = aligned(memory, N * (CONV + SSM))
    conv = typed(raw, start, (N, 3, 16), HALF)
    ssm = typed(raw, start + N * CONV, (N, 2, 8, 8), torch.float32)
    config = config_of(N, [(["m0"], STATES)], N * (CONV + SSM))
    return Layout(memory, {"m0": [conv, ssm]}, config, [Part(conv), Part(ssm)], 2, CONV + SSM)


def hybrid(device: str, ratio: int) -> Layout:
    """Convolution states; over the SSM states K; behind them V: one buffer for two groups."""
    memory = Memory(device)
    padded = CONV + 2 * SSM
    raw, start = aligned(memory, N * padded)
    conv = typed(raw, start, (N, 3, 16), HALF)
    ssm = typed(raw, start + N * CONV, (N, 2, 8, 8), torch.float32)
    shape = (N * ratio, 16 // ratio, 2, 8)
    k = typed(raw, start + N * CONV, shape, HALF)
    v = typed(raw, start + N * (CONV + SSM), shape, HALF)
    assert k[0].numel() * 2 * ratio == SSM
    groups = [
        (["a0"], replace(ATTENTION, page_size_padded=padded)),
        (["m0"], replace(STATES, page_size_padded=padded)),
    ]
    config = config_of(N, groups, N * padded)
    parts = [Part(k, ratio=ratio), Part(v, ratio=ratio), Part(conv), Part(ssm)]
    return Layout(memory, {"a0": (k, v), "m0": [conv, ssm]}, config, parts, 3, padded)


ASCEND: dict[str, Callable[[str], Layout]] = {
    "K and V": separate_k_and_v,
    "spare blocks": spare_blocks,
    "latent and rope": latent_and_rope,
    "kernel blocks": kernel_blocks,
    "indexer key and scale": indexer_key_and_scale,
    "views into a page": strided_views_into_a_page,
    "stacked": stacked,
    "Mamba states": mamba_states,
    "hybrid": lambda device: hybrid(device, 1),
    "hybrid in kernel blocks": lambda device: hybrid(device, 2),
}


@DEVICES
@pytest.mark.parametrize("layout", ASCEND)
def test_ascend(layout: str, device: str) -> None:
    check_round_trip(ASCEND[layout](device))


# -------------------------------------------------------------------------------------- refused


def refused(layout: Layout, reason: str) -> None:
    worker = NpuKVOffloadWorker(None, layout.config, 1 << 20)
    with pytest.raises(ValueError, match=reason):
        worker.register_kv_caches(layout.caches)
    worker.shutdown()


def without_scale(layout: Layout) -> Any:
    (key, _scale) = layout.caches["i0"]
    return {"i0": (key,)}


def test_a_plane_that_is_missing_is_refused() -> None:
    layout = indexer_key_and_scale("cpu")
    layout.caches = without_scale(layout)
    refused(layout, "2080 page_bytes is not what 7 blocks")


def test_a_state_that_is_missing_is_refused() -> None:
    layout = mamba_states("cpu")
    layout.caches["m0"] = layout.caches["m0"][:1]
    refused(layout, r"'m0'.*2 sizes \[96, 512\], but the tensor does not have 2 planes")


def test_a_layer_that_is_missing_is_refused() -> None:
    layout = separate_k_and_v("cpu")
    del layout.caches["l1"]
    refused(layout, r"no KV cache was registered for \['l1'\]")


def test_caches_that_the_engine_keeps_on_the_host_are_refused() -> None:
    layout = separate_k_and_v("npu:0")
    layout.caches["l1"] = tuple(t.cpu() for t in layout.caches["l1"])
    refused(layout, r"several devices: npu:0 \(l0\), cpu \(l1\)")


def test_overlaid_groups_whose_blocks_do_not_coincide_are_refused() -> None:
    layout = hybrid("cpu", 1)
    (k, _v), (conv, _ssm) = layout.caches["a0"], layout.caches["m0"]
    raw = layout.memory.buffers[0]
    start = conv.storage_offset() * 2
    layout.caches["a0"] = (
        typed(raw, start, k.shape, HALF),
        typed(raw, start + N * SSM, k.shape, HALF),
    )
    refused(layout, "different blocks share bytes")

"""The operator on host memory, against a plain reference and on its own counters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from block_reference import assert_same, content, expected_content, make_pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_kv_ops import ops

if TYPE_CHECKING:
    from conftest import RunScript

swap = torch.ops.npu_kv.swap_blocks_batch
DTYPES = [
    torch.int8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
]
relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def with_cpu_ids(dtype: torch.dtype) -> Callable[..., None]:
    def call(src: Any, dst: Any, src_ids: Any, dst_ids: Any) -> None:
        swap(src, dst, torch.tensor(src_ids, dtype=dtype), torch.tensor(dst_ids, dtype=dtype))

    return call


def with_static_ids(src: Any, dst: Any, src_ids: Any, dst_ids: Any) -> None:
    swap.static(src, dst, src_ids, dst_ids)


CALLS = {
    "int64": with_cpu_ids(torch.int64),
    "int32": with_cpu_ids(torch.int32),
    "static": with_static_ids,
    "python": ops.swap_blocks_batch,
}


@st.composite
def block_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors of mixed shapes, strides and dtypes, with ids that a call may legally have."""
    src_blocks = draw(st.integers(1, 12))
    dst_blocks = draw(st.integers(1, 12))
    src, dst = [], []
    for seed in range(draw(st.integers(1, 4))):
        payload = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        kind: dict[str, Any] = {"payload": payload, "dtype": dtype}
        extra = draw(st.integers(0, 3))  # some tensors have more blocks than the smallest
        src.append(make_pool(src_blocks + extra, gap=draw(st.integers(0, 3)), seed=seed, **kind))
        dst.append(make_pool(dst_blocks, gap=draw(st.integers(0, 3)), seed=seed + 50, **kind))
    dst_ids = draw(st.lists(st.integers(0, dst_blocks - 1), unique=True, max_size=dst_blocks))
    # Often neighbours of the destination, so that there are runs to merge, up or down.
    offset = draw(st.integers(-3, 3))
    src_ids = [
        draw(st.sampled_from([(d + offset) % src_blocks, draw(st.integers(0, src_blocks - 1))]))
        for d in dst_ids
    ]
    for position in range(len(dst_ids)):
        kept = draw(st.integers(0, 5))
        if kept == 0:
            src_ids[position] = draw(st.integers(-(2**31), -1))
        elif kept == 1:
            dst_ids[position] = -1
    return {"src": src, "dst": dst, "src_ids": src_ids, "dst_ids": dst_ids}


@relaxed
@given(call=block_calls(), way=st.sampled_from(sorted(CALLS)))
def test_copies_exactly_the_named_payloads(call: dict[str, Any], way: str) -> None:
    src, dst = call["src"], call["dst"]
    untouched = content(src)
    wanted = expected_content(src, dst, call["src_ids"], call["dst_ids"])
    CALLS[way](src, dst, call["src_ids"], call["dst_ids"])
    assert_same(content(dst), wanted)
    assert_same(content(src), untouched)


@relaxed
@given(data=st.data())
def test_overlapping_memory_is_refused_exactly_when_bytes_conflict(data: st.DataObject) -> None:
    """Views of one storage, with any offsets and strides, as sources and as destinations."""
    storage = torch.arange(120, dtype=torch.uint8)

    def view() -> torch.Tensor:
        payload = data.draw(st.integers(1, 8))
        stride = payload + data.draw(st.integers(0, 6))
        blocks = data.draw(st.integers(1, 6))
        room = 120 - (blocks - 1) * stride - payload
        return storage.as_strided((blocks, payload), (stride, 1), data.draw(st.integers(0, room)))

    def like(other: torch.Tensor) -> torch.Tensor:
        payload = other.shape[1]
        stride = data.draw(st.sampled_from([other.stride(0), payload]))
        blocks = data.draw(st.integers(1, 5))
        stride = max(stride, payload)
        room = 120 - (blocks - 1) * stride - payload
        if room < 0:
            blocks, room = 1, 120 - payload
        return storage.as_strided((blocks, payload), (stride, 1), data.draw(st.integers(0, room)))

    dst = [view() for _ in range(data.draw(st.integers(1, 3)))]
    src = [like(tensor) for tensor in dst]
    src_blocks = min(tensor.shape[0] for tensor in src)
    dst_blocks = min(tensor.shape[0] for tensor in dst)
    dst_ids = data.draw(st.lists(st.integers(0, dst_blocks - 1), max_size=3))
    src_ids = [data.draw(st.integers(0, src_blocks - 1)) for _ in dst_ids]

    def bytes_of(tensor: torch.Tensor, ids: list[int]) -> list[int]:
        begin, stride = tensor.storage_offset(), tensor.stride(0)
        return [begin + i * stride + b for i in ids for b in range(tensor.shape[1])]

    written = [byte for tensor in dst for byte in bytes_of(tensor, dst_ids)]
    read = {byte for tensor in src for byte in bytes_of(tensor, src_ids)}
    before = storage.clone()
    if len(set(written)) < len(written) or read & set(written):
        with pytest.raises(ValueError, match=r"named already|shares? memory"):
            swap(src, dst, torch.tensor(src_ids), torch.tensor(dst_ids))
        assert torch.equal(storage, before)
        return
    wanted = before.clone()
    for source, target in zip(src, dst, strict=True):
        for to, at in zip(bytes_of(target, dst_ids), bytes_of(source, src_ids), strict=True):
            wanted[to] = before[at]
    swap(src, dst, torch.tensor(src_ids, dtype=torch.int64), torch.tensor(dst_ids).long())
    assert torch.equal(storage, wanted)


def test_layers_interleaved_in_one_page_are_no_overlap() -> None:
    page = torch.arange(8 * 12, dtype=torch.int16).reshape(8, 12)
    layers = list(page.split([2, 4, 1, 5], dim=1))
    before = page.clone()
    swap(layers, layers, torch.tensor([0, 1]), torch.tensor([6, 7]))
    assert torch.equal(page[6:], before[:2])
    assert torch.equal(page[:6], before[:6])


def test_the_id_lists_may_have_two_dtypes_and_strides() -> None:
    src, dst = [make_pool(6)], [make_pool(6, seed=1)]
    wanted = expected_content(src, dst, [1, 2], [4, 0])
    every_second = torch.tensor([1, 99, 2, 99], dtype=torch.int32)[::2]
    swap(src, dst, every_second, torch.tensor([4, 0]))
    assert_same(content(dst), wanted)


def test_one_source_may_go_to_many_destinations() -> None:
    src, dst = [make_pool(3)], [make_pool(6, seed=1)]
    wanted = expected_content(src, dst, [2, 2, 2], [0, 5, 1])
    swap(src, dst, torch.tensor([2, 2, 2]), torch.tensor([0, 5, 1]))
    assert_same(content(dst), wanted)


def test_what_has_nothing_to_copy_is_legal() -> None:
    ids, none = torch.tensor([0]), torch.tensor([], dtype=torch.int64)
    ops.reset_stats()
    swap([], [], none, none)
    swap([], [], ids, ids)
    swap.static([], [], [], [])
    swap.static([], [], [3], [4])
    swap([make_pool(2)], [make_pool(2)], none, none)
    swap([make_pool(0)], [make_pool(0)], none, none)
    swap([make_pool(0)], [make_pool(0)], -ids - 1, ids)
    swap([make_pool(2, [0, 3])], [make_pool(2, [0, 3])], ids, ids)
    swap([make_pool(2, [])], [make_pool(2, [])], -ids - 1, ids)
    assert ops.stats() == ops.OpStats(0, 0, 0, 0)


def test_one_block_needs_no_particular_stride() -> None:
    src, dst = make_pool(1, [3, 2]), make_pool(4, [3, 2], seed=1)
    wanted = src.clone()
    swap([src.as_strided(src.shape, (0, 2, 1))], [dst], torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(dst[2], wanted[0])


def test_dimensions_of_size_one_need_no_particular_stride() -> None:
    src = make_pool(4, [1, 5]).as_strided((4, 1, 5), (5, 77, 1))
    dst = make_pool(4, [5], seed=1)
    swap([src], [dst], torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(dst[0], src[3, 0])


def test_counters_say_what_was_copied() -> None:
    flat, padded = make_pool(20, [4]), make_pool(20, [4], gap=1)
    ops.reset_stats()
    # Run 3..5 (named backwards) and block 9; one tensor can merge, the other cannot.
    targets = [make_pool(20, [4], seed=1), make_pool(20, [4], seed=2)]
    ids = torch.tensor([5, 4, -1, 3, 9])
    swap([flat, padded], targets, ids, ids)
    assert ops.stats() == ops.OpStats(
        calls=1, bytes=2 * 4 * 16, copies_before=2 * 4, copies_after=2 + 4
    )
    with pytest.raises(IndexError):
        swap([flat, padded], targets, torch.tensor([20]), torch.tensor([0]))
    assert ops.stats().calls == 1, "a refused call counts nothing"
    ops.reset_stats()
    assert ops.stats() == ops.OpStats(0, 0, 0, 0)


def test_large_and_uneven_blocks_arrive_whole() -> None:
    """Enough bytes in few copies for the path that goes past the caches."""
    src = make_pool(6, [(3 << 20) + 13], gap=5, dtype=torch.uint8)
    dst = make_pool(6, [(3 << 20) + 13], gap=2, dtype=torch.uint8, seed=1)
    wanted = expected_content([src], [dst], [0, 1, 2, 5], [3, 4, 5, 0])
    swap([src], [dst], torch.tensor([0, 1, 2, 5]), torch.tensor([3, 4, 5, 0]))
    assert_same(content([dst]), wanted)


def test_threads_call_at_the_same_time() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        src, dst = [make_pool(64, [8], seed=seed)], [make_pool(64, [8], seed=seed + 9)]
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        for _ in range(50):
            dst[0].zero_()
            swap(src, dst, torch.arange(64), order)
            if not torch.equal(dst[0][order].view(torch.int32), src[0].view(torch.int32)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("overload", ["default", "static"])
def test_opcheck(overload: str) -> None:
    src, dst = [make_pool(6, gap=1), make_pool(6)], [make_pool(4, seed=1), make_pool(4, seed=2)]
    ids: Any = ([0, -1, 5], [3, 2, 0])
    if overload == "default":
        ids = tuple(torch.tensor(one) for one in ids)
    torch.library.opcheck(getattr(swap, overload), (src, dst, *ids))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_copies_the_same_blocks(dynamic: bool) -> None:
    @torch.compile(backend="aot_eager", dynamic=dynamic, fullgraph=True)
    def step(
        src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        ops.swap_blocks_batch(src, dst, a, b)
        ops.swap_blocks_batch(dst, src, [1], [0])
        return dst[0].sum()

    for blocks in (5, 6, 7):
        src, dst = [make_pool(blocks, dtype=torch.int32)], [make_pool(blocks, dtype=torch.int32)]
        dst[0].zero_()
        wanted = src[0].clone()
        total = step(src, dst, torch.tensor([blocks - 1, 2]), torch.tensor([1, 3]))
        assert torch.equal(dst[0][1], wanted[blocks - 1])
        assert torch.equal(dst[0][3], wanted[2])
        assert torch.equal(src[0][0], wanted[blocks - 1])
        assert total == dst[0].sum()


def test_the_batch_limit_is_kept_and_checked() -> None:
    before = ops.max_batch()
    try:
        ops.set_max_batch(7)
        assert ops.max_batch() == 7
        for bad in (0, -4):
            with pytest.raises(ValueError, match=f"max_batch must be positive, got {bad}"):
                ops.set_max_batch(bad)
        assert ops.max_batch() == 7
    finally:
        ops.set_max_batch(before)


def test_the_batch_limit_comes_from_the_environment(run_script: RunScript) -> None:
    ran = run_script(
        """
        import os
        from npu_kv_ops import ops
        try:
            ops.max_batch()
        except ValueError as error:
            print(error)
        os.environ["NPU_KV_MAX_BATCH"] = "12"
        print("limit", ops.max_batch())
        """,
        runtime="host",
        env={"NPU_KV_MAX_BATCH": "twelve"},
    )
    assert "NPU_KV_MAX_BATCH must be a positive integer, got 'twelve'" in ran.stdout
    assert "limit 12" in ran.stdout


def test_nothing_pending_raises_nothing() -> None:
    ops.raise_pending_errors()

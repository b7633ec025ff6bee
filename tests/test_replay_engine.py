import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from npu_kv_ops import runtime
from npu_kv_ops.replay.engine import Mismatch, Replay, Sample, Verify
from npu_kv_ops.replay.models import KVModel, KVTensor
from npu_kv_ops.replay.ordering import BlockOrder
from npu_kv_ops.replay.plot import save_plot
from npu_kv_ops.replay.pools import Policy
from npu_kv_ops.replay.report import as_json
from npu_kv_ops.replay.sizing import Sizes
from npu_kv_ops.replay.synthetic import synthetic_trace
from npu_kv_ops.replay.trace import BlockMap, BlockNeed, Request

MODEL = KVModel(
    "small", 3, (KVTensor("key", 16), KVTensor("value", 16), KVTensor("scale", 4)), "float16"
)
BLOCKS = BlockMap(512)
SHRINK = 16


def make_replay(
    process_runtime: str,
    device_blocks: int,
    host_blocks: int,
    *,
    policy: Policy = "eager",
    verify: Verify = "all",
) -> Replay:
    runtime.load()
    block_bytes = MODEL.block_bytes(512, SHRINK)
    full = MODEL.block_bytes(512)
    sizes = Sizes(device_blocks, host_blocks, SHRINK, block_bytes, full, ())
    return Replay(MODEL, BLOCKS, sizes, policy=policy, verify=verify, runtime=process_runtime)


def prompt(*hash_ids: int) -> Request:
    return Request(100 + hash_ids[0], 0.0, 512 * len(hash_ids), 0, hash_ids)


def needs_of(requests: Sequence[Request]) -> list[BlockNeed]:
    return [BLOCKS.need(request) for request in requests]


def run(replay: Replay, requests: Sequence[Request], **options: Any) -> bool:
    return replay.run(requests, needs_of(requests), **options)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("verify", ["all", "sample", "off"])
def test_a_trace_runs_without_mismatches(
    process_runtime: str, policy: Policy, verify: Verify
) -> None:
    requests = synthetic_trace(80, seed=1)
    needs = needs_of(requests)
    device_blocks = max(need.total for need in needs) + 3
    replay = make_replay(
        process_runtime, device_blocks, 5 * device_blocks, policy=policy, verify=verify
    )
    progress: list[int] = []
    assert replay.run(requests, needs, progress=lambda: progress.append(1))

    totals = replay.totals
    block_bytes = replay.sizes.block_bytes
    assert (totals.requests, len(progress), totals.mismatches) == (80, 80, 0)
    prompt_blocks = sum(len(need.keys) for need in needs)
    assert totals.device_hits + totals.host_hits + totals.misses == prompt_blocks
    assert min(totals.device_hits, totals.host_hits, totals.misses) > 0
    assert totals.loads == totals.host_hits
    assert totals.private_blocks == sum(need.private for need in needs)
    if policy == "eager":
        assert totals.stores == totals.misses
    assert totals.h2d_bytes == totals.loads * block_bytes
    assert totals.d2h_bytes == totals.stores * block_bytes
    planes = MODEL.tensor_count
    assert totals.copies_before == planes * (totals.loads + totals.stores)
    assert totals.calls <= totals.copies_after / planes < totals.copies_before / planes / 1.5
    assert len(totals.call_us) == totals.calls
    assert sum(sample.device_hits for sample in totals.samples) == totals.device_hits
    assert max(sample.device_used for sample in totals.samples) <= device_blocks
    used_at_most = prompt_blocks + totals.private_blocks
    if verify == "all":
        # Every use of a block, and what both pools hold in the end.
        ends = len(replay.cache.device) + len(replay.cache.host)
        assert totals.checked == used_at_most + ends
    elif verify == "sample":
        assert 0 < totals.checked < used_at_most / 2
    else:
        assert totals.checked == 0


# Prompt 0 leaves the device when prompt 10 comes, and returns from the host when it comes again.
THERE_AND_BACK = [prompt(0, 1, 2), prompt(10, 11, 12), prompt(0, 1, 2)]


def test_a_corrupted_host_block_is_named(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12)

    def corrupt() -> None:
        if replay.totals.requests == 2:
            replay._lanes.synchronize()
            block = replay.cache.host[(1, 0)]
            for plane, at in ((7, 300), (8, 5)):
                replay.host_tensors[plane][block, at] ^= 1

    run(replay, THERE_AND_BACK, progress=corrupt)
    plane = replay._planes[7]
    in_request = Mismatch("request 3 (line 100)", "hash id 1", plane.layer, plane.tensor, 300, 2)
    # The block is wrong wherever it is found: on its use, then in both pools at the end.
    assert replay.totals.mismatches == 3
    assert replay.totals.first_mismatches[0] == in_request
    assert str(in_request) == (
        f"request 3 (line 100): hash id 1, layer {plane.layer}, {plane.tensor}: "
        "first wrong byte 300 (2 tensors of the block differ)"
    )
    places = [mismatch.where for mismatch in replay.totals.first_mismatches[1:]]
    assert places == ["device pool at the end", "host pool at the end"]


def test_with_verify_off_nothing_is_noticed(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12, verify="off")

    def corrupt() -> None:
        replay._lanes.synchronize()
        replay.host_tensors[0].zero_()

    run(replay, THERE_AND_BACK, progress=corrupt)
    assert (replay.totals.mismatches, replay.totals.host_hits) == (0, 3)


Swap = Callable[[Any, Any, torch.Tensor, torch.Tensor], None]


def loads_skipped(swap: Swap, src: Any, dst: Any, reads: Any, writes: Any) -> None:
    pass


def tensors_exchanged(swap: Swap, src: Any, dst: Any, reads: Any, writes: Any) -> None:
    sizes = [tensor.shape[1] for tensor in src]
    first = next(i for i in range(len(sizes)) if sizes[i] == sizes[i + 1])
    order = list(range(len(sizes)))
    order[first], order[first + 1] = order[first + 1], order[first]
    swap([src[i] for i in order], dst, reads, writes)


def blocks_rotated(swap: Swap, src: Any, dst: Any, reads: Any, writes: Any) -> None:
    swap(src, dst, reads.roll(1), writes)


def one_block_short(swap: Swap, src: Any, dst: Any, reads: Any, writes: Any) -> None:
    swap(src, dst, reads[:-1], writes[:-1])


def one_tensor_short(swap: Swap, src: Any, dst: Any, reads: Any, writes: Any) -> None:
    swap(src[:-1], dst[:-1], reads, writes)


@pytest.mark.parametrize(
    ("fault", "blocks"),
    [
        (loads_skipped, 3),
        (tensors_exchanged, 3),
        (blocks_rotated, 3),
        (one_block_short, 1),
        (one_tensor_short, 3),
    ],
)
@pytest.mark.parametrize("direction", ["loads", "stores"])
def test_copies_that_go_wrong_are_noticed(
    process_runtime: str,
    fault: Callable[..., None],
    blocks: int,
    direction: str,
) -> None:
    replay = make_replay(process_runtime, 3, 12)
    right = replay._swap

    def swap(src: Any, dst: Any, reads: torch.Tensor, writes: torch.Tensor) -> None:
        affected = (
            src is replay.host_tensors if direction == "loads" else dst is replay.host_tensors
        )
        if affected:
            fault(right, src, dst, reads, writes)
        else:
            right(src, dst, reads, writes)

    replay._swap = swap  # type: ignore[assignment]
    run(replay, THERE_AND_BACK)
    third = [m for m in replay.totals.first_mismatches if m.where.startswith("request 3")]
    assert len(third) == blocks


def test_mismatches_are_counted_beyond_those_that_are_kept(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 40, 40)
    replay._swap = lambda *_: None  # type: ignore[assignment]
    for slot in replay._slots:
        for words in slot.read.words:
            words[:] = 0
    run(replay, [prompt(*range(30))])
    assert replay.totals.mismatches == 90  # on their use, and in both pools at the end
    assert len(replay.totals.first_mismatches) == 20


def test_stopping_leaves_the_totals_so_far(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12)
    assert not run(replay, THERE_AND_BACK, stop=lambda: replay.totals.requests == 2)
    assert (replay.totals.requests, replay.totals.misses) == (2, 6)
    assert replay.totals.seconds > 0


def test_speed_waits_for_timestamps_and_stop_ends_the_wait(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12)
    late = [
        Request(1, 5000.0, 512, 0, (0,)),
        Request(2, 5120.0, 512, 0, (1,)),
        Request(3, 1e12, 512, 0, (2,)),
    ]
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += replay.totals.requests == 2
        return asked > 2

    assert not run(replay, late, speed=2.0, stop=stop)
    assert replay.totals.requests == 2
    assert replay.totals.seconds >= 0.06


def test_an_error_of_a_copy_keeps_the_totals_so_far(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12)
    right = replay._swap

    def swap(src: Any, dst: Any, reads: Any, writes: Any) -> None:
        if src is replay.host_tensors:
            raise RuntimeError("no load today")
        right(src, dst, reads, writes)

    replay._swap = swap  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no load today"):
        run(replay, THERE_AND_BACK)
    assert replay.totals.requests == 2
    assert replay.totals.seconds > 0


def test_json_has_the_agreed_keys_and_values(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 3, 12)
    run(replay, THERE_AND_BACK)
    found = as_json(replay.totals, process_runtime)
    block_bytes = replay.sizes.block_bytes
    assert list(found) == [
        "requests",
        "device_hits",
        "host_hits",
        "misses",
        "stores",
        "loads",
        "h2d_bytes",
        "d2h_bytes",
        "copies_before",
        "copies_after",
        "call_us_p50",
        "call_us_p99",
        "mismatches",
        "runtime",
        "seconds",
    ]
    assert found["requests"] == 3
    assert (found["device_hits"], found["host_hits"], found["misses"]) == (0, 3, 6)
    assert (found["stores"], found["loads"]) == (6, 3)
    assert (found["h2d_bytes"], found["d2h_bytes"]) == (3 * block_bytes, 6 * block_bytes)
    assert (found["copies_before"], found["mismatches"]) == (9 * 9, 0)
    assert 0 < found["call_us_p50"] <= found["call_us_p99"]
    assert found["runtime"] == process_runtime


@pytest.mark.parametrize("lane", [0, 1, 2], ids=["compute", "load", "store"])
def test_streams_do_not_overtake_each_other(sim: ModuleType, npu: torch.device, lane: int) -> None:
    """With any one of the streams held back, the others still wait where they must."""
    replay = make_replay("sim", 3, 12, policy="lazy")
    stream = replay._lanes._streams[lane].npu_stream
    timers = []

    def hold_back() -> None:
        stall = sim.stall(stream)
        timers.append(threading.Timer(0.1, stall.release))
        timers[-1].start()

    requests = [prompt(0, 1, 2), prompt(10, 11, 12)] * 3
    run(replay, requests, progress=hold_back)
    for timer in timers:
        timer.join()
    assert replay.totals.host_hits == 12
    assert replay.totals.mismatches == 0


def test_without_waits_a_stream_held_back_is_noticed(
    sim: ModuleType, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockOrder, "add", lambda *_: [0, 0, 0])
    replay = make_replay("sim", 3, 12)
    timers = []

    def hold_back() -> None:
        if replay.totals.requests == 2:
            # Loads come late, so what the third request uses is what the second left behind.
            stall = sim.stall(replay._lanes._streams[1].npu_stream)
            timers.append(threading.Timer(0.5, stall.release))
            timers[-1].start()

    run(replay, THERE_AND_BACK, progress=hold_back)
    for timer in timers:
        timer.join()
    third = [m for m in replay.totals.first_mismatches if m.where.startswith("request 3")]
    assert len(third) == 3


@pytest.mark.parametrize("requests", [0, 1, 3, 450])
def test_any_number_of_requests_can_be_drawn(requests: int, tmp_path: Path) -> None:
    samples = [Sample(i % 3, i % 5, i % 7, i % 4, i % 9, 1000 * i, 500) for i in range(requests)]
    path = tmp_path / "plot.png"
    save_plot(path, samples, Sizes(4, 12, 1, 8, 8, ()), "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pools_take_no_more_memory_than_said(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 6, 24)
    for tensors, blocks in ((replay.device_tensors, 6), (replay.host_tensors, 24)):
        assert len(tensors) == MODEL.tensor_count
        assert sum(t.shape[1] for t in tensors) == replay.sizes.block_bytes
        assert all(t.shape[0] == blocks for t in tensors)
    pointers = np.array([t.data_ptr() for t in replay.device_tensors])
    assert len(np.unique(pointers)) == MODEL.tensor_count

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import eventually

from npu_kv_ops import NPUDmaCopyBackend, TransferError, TransferEvent, runtime
from npu_kv_ops.replay.engine import Mismatch, Replay, Sample, Verify
from npu_kv_ops.replay.models import KVModel, KVTensor
from npu_kv_ops.replay.movers import Backend
from npu_kv_ops.replay.ordering import BlockOrder, Lane
from npu_kv_ops.replay.plot import save_plot
from npu_kv_ops.replay.pools import Move, Policy
from npu_kv_ops.replay.report import as_json
from npu_kv_ops.replay.sizing import Sizes
from npu_kv_ops.replay.synthetic import synthetic_trace
from npu_kv_ops.replay.trace import BlockMap, BlockNeed, Request

MODEL = KVModel(
    "small", 3, (KVTensor("key", 16), KVTensor("value", 16), KVTensor("scale", 4)), "float16"
)
BLOCKS = BlockMap(512)
SHRINK = 16

each_backend = pytest.mark.parametrize("backend", ["eager", "scheduler"])


def make_replay(
    process_runtime: str,
    device_blocks: int,
    host_blocks: int,
    *,
    policy: Policy = "eager",
    verify: Verify = "all",
    backend: Backend = "scheduler",
    ahead: int = 2,
) -> Replay:
    runtime.load()
    block_bytes = MODEL.block_bytes(512, SHRINK)
    full = MODEL.block_bytes(512)
    sizes = Sizes(device_blocks, host_blocks, SHRINK, block_bytes, full, ())
    return Replay(
        MODEL,
        BLOCKS,
        sizes,
        policy=policy,
        verify=verify,
        runtime=process_runtime,
        backend=backend,
        ahead=ahead,
    )


def prompt(*hash_ids: int) -> Request:
    return Request(100 + hash_ids[0], 0.0, 512 * len(hash_ids), 0, hash_ids)


def needs_of(requests: Sequence[Request]) -> list[BlockNeed]:
    return [BLOCKS.need(request) for request in requests]


def run(replay: Replay, requests: Sequence[Request], **options: Any) -> bool:
    return replay.run(requests, needs_of(requests), **options)


@each_backend
@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("verify", ["all", "sample", "off"])
def test_a_trace_runs_without_mismatches(
    process_runtime: str, policy: Policy, verify: Verify, backend: Backend
) -> None:
    requests = synthetic_trace(80, seed=1)
    needs = needs_of(requests)
    device_blocks = max(need.total for need in needs) + 3
    replay = make_replay(
        process_runtime,
        device_blocks,
        5 * device_blocks,
        policy=policy,
        verify=verify,
        backend=backend,
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
    traffic, planes = totals.traffic, MODEL.tensor_count
    assert traffic.h2d_bytes == totals.loads * block_bytes
    assert traffic.d2h_bytes == totals.stores * block_bytes
    assert traffic.copies_before == planes * (totals.loads + totals.stores)
    assert traffic.calls <= traffic.copies_after / planes < traffic.copies_before / planes / 1.5
    assert len(traffic.call_us) == traffic.calls
    assert sum(sample.h2d_bytes for sample in totals.samples) == traffic.h2d_bytes
    assert sum(sample.d2h_bytes for sample in totals.samples) == traffic.d2h_bytes
    if backend == "eager":
        assert traffic.lanes is None
    else:
        assert traffic.lanes is not None
        assert traffic.lanes.loads.jobs + traffic.lanes.stores.jobs == traffic.calls
        assert (traffic.lanes.queue_depth, traffic.lanes.failures) == (0, 0)
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


@each_backend
def test_a_corrupted_host_block_is_named(process_runtime: str, backend: Backend) -> None:
    replay = make_replay(process_runtime, 3, 12, backend=backend)

    def corrupt() -> None:
        if replay.totals.requests == 2:
            replay._mover.synchronize()
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
        replay._mover.synchronize()
        replay.host_tensors[0].zero_()

    run(replay, THERE_AND_BACK, progress=corrupt)
    assert (replay.totals.mismatches, replay.totals.host_hits) == (0, 3)


Moves = Sequence[Move]


def moves_skipped(moves: Moves) -> Moves:
    return []


def blocks_rotated(moves: Moves) -> Moves:
    hosts = [move.host_block for move in moves]
    return [
        Move(move.key, move.device_block, host) for move, host in zip(moves, hosts[1:] + hosts[:1])
    ]


def one_block_short(moves: Moves) -> Moves:
    return moves[:-1]


@each_backend
@pytest.mark.parametrize(
    ("fault", "blocks"), [(moves_skipped, 3), (blocks_rotated, 3), (one_block_short, 1)]
)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_moves_that_go_wrong_are_noticed(
    process_runtime: str,
    backend: Backend,
    fault: Callable[[Moves], Moves],
    blocks: int,
    direction: str,
) -> None:
    replay = make_replay(process_runtime, 3, 12, backend=backend)
    right = getattr(replay._mover, direction)
    setattr(replay._mover, direction, lambda moves: right(fault(moves)))
    run(replay, THERE_AND_BACK)
    third = [m for m in replay.totals.first_mismatches if m.where.startswith("request 3")]
    assert len(third) == blocks


def first_two_exchanged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [tensor.shape[1] for tensor in tensors]
    first = next(i for i in range(len(sizes)) if sizes[i] == sizes[i + 1])
    order = list(range(len(sizes)))
    order[first], order[first + 1] = order[first + 1], order[first]
    return [tensors[i] for i in order]


def last_left_out(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors[:-1]


Tensors = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@pytest.mark.parametrize(
    ("source", "target"),
    [(first_two_exchanged, list), (last_left_out, last_left_out)],
    ids=["exchanged", "left out"],
)
@pytest.mark.parametrize("loads", [True, False], ids=["loads", "stores"])
def test_tensors_that_go_wrong_are_noticed(
    process_runtime: str, source: Tensors, target: Tensors, loads: bool
) -> None:
    replay = make_replay(process_runtime, 3, 12, backend="eager")
    mover: Any = replay._mover
    right = mover._swap

    def swap(src: Any, dst: Any, reads: torch.Tensor, writes: torch.Tensor) -> None:
        if (src is mover._host_tensors) is loads:
            src, dst = source(src), target(dst)
        right(src, dst, reads, writes)

    mover._swap = swap
    run(replay, THERE_AND_BACK)
    third = [m for m in replay.totals.first_mismatches if m.where.startswith("request 3")]
    assert len(third) == 3


def test_mismatches_are_counted_beyond_those_that_are_kept(process_runtime: str) -> None:
    replay = make_replay(process_runtime, 40, 40)
    replay._swap = lambda *_: None
    replay._mover.store = lambda _: None  # type: ignore[method-assign]
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


@each_backend
def test_an_error_of_a_copy_keeps_the_totals_so_far(process_runtime: str, backend: Backend) -> None:
    replay = make_replay(process_runtime, 3, 12, backend=backend)

    def load(moves: Moves) -> None:
        if moves:
            raise RuntimeError("no load today")

    replay._mover.load = load  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no load today"):
        run(replay, THERE_AND_BACK)
    assert replay.totals.requests == 2
    assert replay.totals.seconds > 0
    assert replay.totals.traffic.d2h_bytes == 6 * replay.sizes.block_bytes


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_job_that_fails_ends_the_run(sim: ModuleType, npu: torch.device, direction: str) -> None:
    replay = make_replay("sim", 3, 12)
    right = getattr(replay._mover, direction)

    def move(moves: Moves) -> None:
        if moves:
            replay._mover.synchronize()
            sim.fail_call("aclrtMemcpyAsync", times=1000, code=500000)
            sim.fail_call("aclrtMemcpyBatchAsync", times=1000, code=500000)
        right(moves)
        if moves:
            backend: NPUDmaCopyBackend = replay._mover._backend  # type: ignore[attr-defined]
            backend.synchronize(60)
            sim.clear_faults()

    setattr(replay._mover, direction, move)
    with pytest.raises(TransferError, match=direction):
        run(replay, THERE_AND_BACK)
    lanes = replay.totals.traffic.lanes
    assert lanes is not None
    assert lanes.failures > 0


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
        "scheduler",
    ]
    assert found["requests"] == 3
    assert (found["device_hits"], found["host_hits"], found["misses"]) == (0, 3, 6)
    assert (found["stores"], found["loads"]) == (6, 3)
    assert (found["h2d_bytes"], found["d2h_bytes"]) == (3 * block_bytes, 6 * block_bytes)
    assert (found["copies_before"], found["mismatches"]) == (9 * 9, 0)
    assert 0 < found["call_us_p50"] <= found["call_us_p99"]
    assert found["runtime"] == process_runtime
    loads, stores = found["scheduler"]["loads"], found["scheduler"]["stores"]
    assert (loads["jobs"], stores["jobs"], loads["failures"], stores["failures"]) == (1, 2, 0, 0)
    assert (loads["peak_depth"], stores["bytes"]) == (1, 6 * block_bytes)
    assert 0 < loads["launch_us_p50"] <= loads["launch_us_p99"]
    assert 0 < stores["completion_us_p50"] <= stores["completion_us_p99"]

    eager = make_replay(process_runtime, 3, 12, backend="eager")
    run(eager, THERE_AND_BACK)
    assert as_json(eager.totals, process_runtime)["scheduler"] is None


def stream_handle(replay: Replay, lane: Lane) -> int:
    """The runtime's handle of the stream of a lane."""
    mover: Any = replay._mover
    if hasattr(mover, "_streams"):
        return int(mover._streams[lane].npu_stream)
    if lane is Lane.COMPUTE:
        return int(mover._stream.npu_stream)
    handles = mover._backend._core.stream_handles()
    return int(handles[0 if lane is Lane.LOAD else 1])


@each_backend
@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("lane", Lane, ids=lambda lane: lane.name)
def test_lanes_do_not_overtake_each_other(
    sim: ModuleType, npu: torch.device, lane: Lane, policy: Policy, backend: Backend
) -> None:
    """With any one of the streams held back, the others still wait where they must."""
    # Room for the next request besides the current one, so loads are launched ahead.
    replay = make_replay("sim", 6, 12, policy=policy, backend=backend)
    timers = []

    def hold_back() -> None:
        stall = sim.stall(stream_handle(replay, lane))
        timers.append(threading.Timer(0.05, stall.release))
        timers[-1].start()

    requests = [prompt(0, 1, 2), prompt(10, 11, 12), prompt(20, 21, 22)] * 3
    run(replay, requests, progress=hold_back)
    for timer in timers:
        timer.join()
    assert replay.totals.host_hits == 18
    assert replay.totals.mismatches == 0


@each_backend
@pytest.mark.parametrize("ahead", [0, 1])
def test_loads_are_launched_ahead(process_runtime: str, ahead: int, backend: Backend) -> None:
    replay = make_replay(process_runtime, 6, 12, backend=backend, ahead=ahead)
    right, mover = replay._serve, replay._mover
    checked: list[int] = []

    def serve(*arguments: Any) -> None:
        # The third request computes only after this; what the fourth loads is there before, or not.
        if replay.totals.requests == 2:
            loaded = 3 * replay.sizes.block_bytes * ahead
            assert eventually(lambda: mover.traffic().h2d_bytes == loaded)
            checked.append(loaded)
        right(*arguments)

    replay._serve = serve  # type: ignore[method-assign]
    run(replay, [prompt(0, 1, 2), prompt(10, 11, 12), prompt(20, 21, 22), prompt(0, 1, 2)])
    assert len(checked) == 1
    assert (replay.totals.host_hits, replay.totals.mismatches) == (3, 0)


def computing_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEvent, "wait", lambda *_: None)


def without_event(monkeypatch: pytest.MonkeyPatch, stores: bool) -> None:
    right = NPUDmaCopyBackend.launch_copy

    def launch_copy(*arguments: Any) -> None:
        *others, event = arguments
        right(*others, None if others[3] is stores else event)

    monkeypatch.setattr(NPUDmaCopyBackend, "launch_copy", launch_copy)


def loads_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_event(monkeypatch, stores=False)


def stores_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_event(monkeypatch, stores=True)


@pytest.mark.races
@pytest.mark.parametrize(
    ("fault", "lane", "first", "last"),
    [
        # The third request uses its blocks before they are loaded.
        (computing_waits_for_nothing, Lane.LOAD, 1, 3),
        # The second request writes the blocks of the first, which are not stored yet.
        (computing_waits_for_nothing, Lane.STORE, 0, 2),
        # The blocks of the first request are stored before they are written.
        (stores_wait_for_nothing, Lane.COMPUTE, 0, 1),
        # The blocks of the third request are loaded before the second has written its own there.
        (loads_wait_for_nothing, Lane.COMPUTE, 1, 2),
    ],
)
def test_a_wrong_order_is_noticed(
    sim: ModuleType,
    npu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    lane: Lane,
    first: int,
    last: int,
) -> None:
    """`lane` is held back from before request `first` is served to before `last` is (3: the end).

    Then whatever else does not wait for it comes first.
    """
    fault(monkeypatch)
    replay = make_replay("sim", 3, 12)
    mover: Any = replay._mover
    right_serve, right_synchronize = replay._serve, mover.synchronize
    stalls = []

    def release() -> None:
        if lane is Lane.COMPUTE:
            mover._backend.synchronize(60)
        else:
            mover._stream.synchronize()
        stalls[0].release()

    def serve(*arguments: Any) -> None:
        if replay.totals.requests == first:
            right_synchronize()  # or what came before is held back too
            stalls.append(sim.stall(stream_handle(replay, lane)))
        elif replay.totals.requests == last:
            release()
        right_serve(*arguments)

    def synchronize() -> None:
        release()
        right_synchronize()

    replay._serve = serve  # type: ignore[method-assign]
    mover.synchronize = synchronize
    # No store of the second request is between its computing and the load into its blocks.
    own_blocks_only = Request(110, 0.0, 100, 1400, (10,))
    run(replay, [prompt(0, 1, 2), own_blocks_only, prompt(0, 1, 2)])
    third = [m for m in replay.totals.first_mismatches if m.where.startswith("request 3")]
    assert len(third) == 3


@pytest.mark.races
def test_without_waits_between_streams_a_wrong_order_is_noticed(
    sim: ModuleType, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockOrder, "add", lambda *_: [0, 0, 0])
    replay = make_replay("sim", 3, 12, backend="eager")
    right = replay._mover.synchronize
    stalls = []

    def hold_back() -> None:
        if replay.totals.requests == 2:
            # Loads come late, so what the third request uses is what the second left behind.
            stalls.append(sim.stall(stream_handle(replay, Lane.LOAD)))

    def synchronize() -> None:
        stalls[0].release()
        right()

    replay._mover.synchronize = synchronize  # type: ignore[method-assign]
    run(replay, THERE_AND_BACK, progress=hold_back)
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

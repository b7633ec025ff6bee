"""The race checker: what it finds, what it leaves alone, and that our own waits are all needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from backend_pools import WAIT_S, Pools, backend_on, load, store
from conftest import eventually

import npu_kv_ops as kv
from npu_kv_ops import ops

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu

ORDERING = ("aclrtRecordEvent", "aclrtStreamWaitEvent")


@pytest.fixture(autouse=True)
def _idle_simulator(sim: ModuleType, npu: torch.device) -> None:
    """Every test here needs both."""


@contextmanager
def racing(sim: ModuleType) -> Iterator[list]:
    """The races of the block, of which there has to be one."""
    found: list = []
    with pytest.raises(sim.RaceError) as raised, sim.check_races():
        yield found
        torch.npu.synchronize()
    found += raised.value.races


@contextmanager
def silent(sim: ModuleType) -> Iterator[None]:
    with sim.check_races():
        yield
        torch.npu.synchronize()


# What a race looks like


def test_a_race_names_both_accesses(sim: ModuleType) -> None:
    x = torch.zeros(1024, device="npu")
    host = torch.zeros(1024).pin_memory()
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with racing(sim) as found, torch.npu.stream(side), sim.stall(side.npu_stream):
        x[100:200].mul_(2)
        with torch.npu.stream(main):
            x.copy_(host, non_blocking=True)
            main.synchronize()
    (race,) = found
    assert (race.kind, race.place, race.bytes, race.count) == ("access", "device", 400, 1)
    assert race.address == x.data_ptr() + 400
    first, second = race.first, race.second
    assert (first.call, first.kind, first.operator) == ("aclrtMemcpyAsync", "copy", "")
    assert (second.call, second.operator) == ("aclopCompileAndExecute", "Mul")
    assert (first.handle, second.handle) == (main.npu_stream, side.npu_stream)
    assert first.writes
    assert second.writes  # it reads too, which is the same race
    assert "libtorch_npu" in first.callers
    assert first.thread == second.thread != 0  # that of the task queue
    text = str(race)
    assert "write by operator Mul" in text
    assert "write by copy" in text
    assert hex(side.npu_stream) in text


def test_the_message_shows_every_race(sim: ModuleType) -> None:
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with (
        pytest.raises(sim.RaceError, match=r"(?s)^1 race .*write by operator ZerosLike") as raised,
        sim.check_races(),
    ):
        x.zero_()
        with torch.npu.stream(torch.npu.Stream()):
            x.zero_()
        torch.npu.synchronize()
    assert raised.value.races[0].first.operator == "ZerosLike"
    assert not sim.races()


def test_outside_of_the_block_nothing_is_checked(sim: ModuleType) -> None:
    was_on = sim.checks_races()
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()

    def race() -> None:
        x.zero_()
        with torch.npu.stream(torch.npu.Stream()):
            x.zero_()
        torch.npu.synchronize()

    race()
    assert bool(sim.races()) == was_on
    with racing(sim):
        assert sim.checks_races()
        with silent(sim):
            pass
        assert sim.checks_races()  # the inner block has not ended the outer one
        race()
    assert sim.checks_races() == was_on


def test_an_error_in_the_block_goes_first(sim: ModuleType) -> None:
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with pytest.raises(ZeroDivisionError), sim.check_races():
        x.zero_()
        with torch.npu.stream(torch.npu.Stream()):
            x.zero_()
        torch.npu.synchronize()
        _ = 1 / 0
    assert not sim.races()


@pytest.mark.parametrize(
    "arguments",
    [{"name": "aclrtMalloc"}, {"name": "aclrtRecordEvent", "nth": 0}, {"name": "fly", "times": 1}],
)
def test_calls_that_cannot_be_dropped_are_refused(
    sim: ModuleType, arguments: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"cannot be dropped|start at 1"):
        sim.drop_call(**arguments)


# Which bytes an operator uses


def _elsewhere(sim: ModuleType, pool: torch.Tensor, work: Callable[[torch.Tensor], object]) -> None:
    """`work` on another stream than a copy into block 3 of the pool, which is still to come."""
    host = torch.zeros_like(pool[3], device="cpu").pin_memory()
    torch.npu.synchronize()
    with sim.stall(torch.npu.current_stream().npu_stream):
        pool[3].copy_(host, non_blocking=True)
        with torch.npu.stream(torch.npu.Stream()):
            work(pool)
    torch.npu.synchronize()


ROWS = torch.tensor([0, 2, 7])
USES = {
    "a block": lambda pool, rows: pool[int(rows[0])].add_(1),
    "index_put_": lambda pool, rows: pool.index_put_((rows.npu(),), torch.ones(4, 8).npu()),
    "index_put_ from the end": lambda pool, rows: pool.index_put_(
        (rows.npu() - 8,), torch.ones(4, 8).npu()
    ),
    "index_put_ in two dimensions": lambda pool, rows: pool.index_put_(
        (rows.npu(), torch.tensor([1, 2, 3]).npu()), torch.ones(8).npu()
    ),
    "index_select": lambda pool, rows: pool.index_select(0, rows.npu()),
    "an index": lambda pool, rows: pool[rows.npu()],
    "a slice that is made dense": lambda pool, rows: pool[int(rows[0]) :: 4, 1:3].contiguous(),
    "a copy into a view": lambda pool, rows: pool[int(rows[0]) :: 4, 1:3].copy_(
        torch.ones(1, 2, 8).npu()
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_operator_uses_the_bytes_that_it_touches_and_no_others(
    sim: ModuleType, use: str
) -> None:
    pool = torch.zeros(8, 4, 8, device="npu")
    with silent(sim):
        _elsewhere(sim, pool, lambda pool: USES[use](pool, ROWS))
    with racing(sim):
        _elsewhere(sim, pool, lambda pool: USES[use](pool, torch.tensor([3, 1, 4])))


def test_memory_of_the_caching_allocator_is_used_again(sim: ModuleType) -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    size = 6 << 20  # large enough for a segment of its own, which nothing else fits
    host = torch.empty(size).pin_memory()
    for recorded in (True, False):
        # Or there are two that fit, and which one is taken depends on their addresses.
        torch.npu.synchronize()
        torch.npu.empty_cache()
        with silent(sim) if recorded else racing(sim):
            x = torch.ones(size, device="npu")
            side.wait_stream(main)
            with torch.npu.stream(side), sim.stall(side.npu_stream):
                host.copy_(x, non_blocking=True)
                if recorded:
                    x.record_stream(side)
                address = x.data_ptr()
                del x
                with torch.npu.stream(main):
                    y = torch.zeros(size, device="npu")
                main.synchronize()
            assert (y.data_ptr() == address) != recorded
            del y


# Every wait and every record of our own is needed: without any of them there is a race.


class Scene:
    """Pools, and streams that can be held, so that nobody learns by chance that work is over."""

    def __init__(self, sim: ModuleType) -> None:
        self.sim = sim
        self.pools = Pools(tensors=1)
        self.npu, self.cpu = self.pools.npu[0], self.pools.cpu[0]
        self.compute, self.side = torch.npu.Stream(), torch.npu.Stream()

    def ids(self, *ids: int) -> torch.Tensor:
        return torch.tensor(ids)


def operator_on_a_side_stream(scene: Scene) -> None:
    held = scene.sim.stall(scene.compute.npu_stream), scene.sim.stall(scene.side.npu_stream)
    with held[0], held[1], torch.npu.stream(scene.compute):
        scene.npu[1].fill_(1)
        scene.side.wait_stream(scene.compute)
        with torch.npu.stream(scene.side):
            kv.swap_blocks_batch([scene.npu], [scene.cpu], scene.ids(1), scene.ids(5))
        scene.compute.wait_stream(scene.side)
        scene.npu[1].fill_(2)
        done = scene.compute.record_event()
        assert not done.query()  # all of it has been issued


def load_behind_an_event(scene: Scene) -> None:
    """The event, the relay of the gate, the lane, and the reader behind the load."""
    with backend_on(scene.pools) as backend, torch.npu.stream(scene.compute):
        with scene.sim.stall(scene.compute.npu_stream):
            scene.npu[2].clone()
            event = torch.npu.Event()
            event.record(scene.compute)
            job = load(backend, [5], [2], event)
            job.wait(scene.compute)
            scene.npu[2].clone()
            assert eventually(lambda: backend.stats().loads.queued == 0)
        scene.compute.synchronize()


def load_behind_a_store(scene: Scene) -> None:
    """Two lanes, one block: the load waits for the store."""
    with backend_on(scene.pools, store_stream=scene.side) as backend:
        with scene.sim.stall(scene.side.npu_stream):
            store(backend, [1], [5])
            job = load(backend, [5], [2])
            assert eventually(lambda: backend.stats().loads.queued == 0)
        job.synchronize(WAIT_S)
        scene.npu.cpu()  # a copy that waits for nothing but the current stream


def store_behind_a_load(scene: Scene) -> None:
    with backend_on(scene.pools, load_stream=scene.side) as backend:
        with scene.sim.stall(scene.side.npu_stream):
            load(backend, [5], [2])
            job = store(backend, [2], [6])
            assert eventually(lambda: backend.stats().stores.queued == 0)
        job.synchronize(WAIT_S)
        torch.empty_like(scene.npu[0]).copy_(scene.cpu[6])


def replayed_load_behind_a_store(scene: Scene) -> None:
    with backend_on(scene.pools, store_stream=scene.side) as backend:
        graph = backend.capture([5], [2], is_store=False)
        events: list = []
        with scene.sim.stall(scene.side.npu_stream):
            store(backend, [1], [5])
            backend.launch_graph(graph, 1, events)
            assert eventually(lambda: backend.stats().loads.queued == 0)
        events[0][1].synchronize(WAIT_S)
        scene.npu.cpu()


def captured_load_on_a_side_stream(scene: Scene) -> None:
    """In the middle of a graph the reader waits for the load; the streams join at the end."""
    graph = torch.npu.NPUGraph()
    loaded = torch.npu.Event()
    with torch.npu.graph(graph, stream=scene.compute):
        scene.side.wait_stream(scene.compute)
        with torch.npu.stream(scene.side):
            kv.swap_blocks_batch([scene.cpu], [scene.npu], [5], [1])
            loaded.record()
            scene.npu[7].fill_(1)
        scene.compute.wait_event(loaded)
        scene.npu[1].add_(1)
        scene.compute.wait_stream(scene.side)
    graph.replay()
    graph.replay()
    torch.npu.synchronize()


# Marks where a job begins on a stream of the caller's; it is asked about and not waited for.
MARK = ("aclrtRecordEvent", 1)

# With the calls that are left alone.
SCENARIOS: dict[Callable[[Scene], None], set[tuple[str, int]]] = {
    operator_on_a_side_stream: {("aclrtRecordEvent", 3)},  # the scene's own
    load_behind_an_event: set(),
    load_behind_a_store: {MARK},
    store_behind_a_load: {MARK},
    replayed_load_behind_a_store: {MARK},
    # Without the fork and the join the capture ends with an error.
    captured_load_on_a_side_stream: {(name, nth) for name in ORDERING for nth in (1, 3)},
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_every_wait_and_record_is_needed(
    sim: ModuleType, scenario: Callable[[Scene], None]
) -> None:
    def run(drop: tuple[str, int] | None) -> dict[str, int]:
        scene = Scene(sim)
        torch.npu.synchronize()
        # Letting go of a graph of the run before makes calls too.
        assert eventually(lambda: ops.live_graphs() == 0)
        sim.reset_stats()
        if drop:
            sim.drop_call(drop[0], nth=drop[1])
        with sim.check_races():
            scenario(scene)
            torch.npu.synchronize()
        return sim.stats().calls

    calls = run(None)
    drops = {(name, nth) for name in ORDERING for nth in range(1, calls[name] + 1)}
    assert len(drops) >= 3
    not_needed = set()
    for drop in sorted(drops - SCENARIOS[scenario]):
        try:
            run(drop)
        except sim.RaceError:
            pass
        else:
            not_needed.add(drop)
        sim.clear_faults()
        torch.npu.synchronize()
        sim.races()
    assert not not_needed


@pytest.mark.parametrize("drop", [None, "aclrtValueWait", "aclrtValueWrite"])
def test_a_graph_waits_for_the_copies_of_its_calls_with_npu_ids(
    sim: ModuleType, drop: str | None
) -> None:
    """The scheduler copies while the graph waits for a word, which it then sets back."""
    scene = Scene(sim)
    ids, targets = torch.tensor([5]).npu(), torch.tensor([1]).npu()
    torch.npu.synchronize()
    with silent(sim) if drop is None else racing(sim):
        graph = torch.npu.NPUGraph()
        if drop:
            sim.drop_call(drop)  # of the capture; in the replays the scheduler writes the word
        with torch.npu.graph(graph, stream=scene.compute):
            kv.swap_blocks_batch([scene.cpu], [scene.npu], ids, targets)
            scene.npu[1].add_(1)
        for _ in range(3):
            graph.replay()
        torch.npu.synchronize()
    torch.npu.synchronize()


# Whole processes

RACY = """
    import torch
    from npu_kv_ops import simulator
    x = torch.zeros(64, device="npu")
    with torch.npu.stream(torch.npu.Stream()):
        x.zero_()
    torch.npu.synchronize()
    print("end")
"""


def test_a_process_that_races_says_so_and_fails(run_script: RunScript) -> None:
    done = run_script(RACY, env={"NPU_KV_SIM_CHECK_RACES": "1"}, check=False)
    assert (done.returncode, done.stdout) == (66, "end\n")
    assert "1 races" in done.stderr
    assert "ZerosLike" in done.stderr


@pytest.mark.parametrize(
    ("value", "tail"), [("0", ""), ("1", "    print(len(simulator.races()))\n")]
)
def test_a_process_ends_well_when_nobody_checks_or_its_races_are_taken(
    run_script: RunScript, value: str, tail: str
) -> None:
    done = run_script(RACY + tail, env={"NPU_KV_SIM_CHECK_RACES": value})
    assert done.stdout.split() == ["end"] + ["1"] * bool(tail)

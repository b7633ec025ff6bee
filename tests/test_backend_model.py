"""Random jobs against a plain model of two pools: after every flush each byte of both agrees.

The model runs the jobs one after the other, so it also says that no order which matters was lost.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from backend_pools import WAIT_S, Events, Pools, backend_on
from hypothesis import HealthCheck, given, settings

from npu_kv_ops import NPUDmaCopyBackend, TransferError, TransferGraph

DEVICE_BLOCKS, HOST_BLOCKS = 5, 7  # few, so that jobs meet

Pairs = tuple[list[int], list[int]]


@st.composite
def pairs(draw: st.DrawFn, is_store: bool) -> Pairs:
    sizes = (DEVICE_BLOCKS, HOST_BLOCKS) if is_store else (HOST_BLOCKS, DEVICE_BLOCKS)
    count = draw(st.integers(0, DEVICE_BLOCKS))
    src = draw(st.lists(st.integers(-1, sizes[0] - 1), min_size=count, max_size=count))
    dst = draw(st.permutations(range(sizes[1])))[:count]
    return src, dst


def jobs(kind: str) -> st.SearchStrategy[tuple[object, ...]]:
    return st.booleans().flatmap(
        lambda is_store: st.tuples(st.just(kind), st.just(is_store), pairs(is_store))
    )


STEPS = st.lists(
    st.one_of(
        jobs("copy"),
        jobs("copy"),
        jobs("copy behind compute"),
        jobs("graph"),
        jobs("failing copy"),
        st.tuples(st.just("compute"), st.integers(0, DEVICE_BLOCKS - 1), st.integers(0, 99)),
        st.tuples(st.just("wait")),
        st.tuples(st.just("flush")),
        st.tuples(st.just("stall")),
        st.tuples(st.just("release")),
    ),
    min_size=1,
    max_size=40,
)


class Run:
    """A backend, its model, and a compute stream that writes device blocks in between."""

    def __init__(self, device: str, simulator: ModuleType | None, closing: ExitStack) -> None:
        self.simulator = simulator
        self.pools = Pools(device, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, tensors=2)
        self.backend: NPUDmaCopyBackend = closing.enter_context(backend_on(self.pools))
        self.events: Events = []
        self.graphs: list[TransferGraph] = []
        self.stream = torch.npu.Stream() if simulator else None
        self.stall = None
        closing.callback(self.release)

    def launch(self, kind: str, is_store: bool, ids: Pairs) -> None:
        event = None
        if kind == "copy behind compute" and self.stream is not None:
            event = torch.npu.Event()
            event.record(self.stream)
        index = len(self.events)
        if kind == "graph":
            self.graphs.append(self.backend.capture(*ids, is_store))
            self.backend.launch_graph(self.graphs[-1], index, self.events, event)
        else:
            self.backend.launch_copy(*ids, is_store, index, self.events, event)
        self.pools.apply(*ids, is_store)

    def launch_failing(self, is_store: bool, ids: Pairs) -> None:
        """A job of which nothing is copied, amid the others: everything else must go on."""
        if self.simulator is None or not any(s >= 0 for s in ids[0]):
            return
        self.flush()
        self.simulator.fail_call("aclrtMemcpyBatchAsync", code=507899)
        self.backend.launch_copy(*ids, is_store, 99, self.events)
        with pytest.raises(TransferError, match="99"):
            self.events.pop()[1].synchronize(WAIT_S)

    def compute(self, block: int, value: int) -> None:
        """The engine's rule: it writes a block when the jobs that use the block are done."""
        self.flush()
        for tensor, model in zip(self.pools.npu, self.pools.npu_model):
            if self.stream is None:
                tensor[block] = value
            else:
                with torch.npu.stream(self.stream):
                    tensor[block].fill_(value)
            model[block] = value
        if self.stream is not None:
            # What follows without an event would not see it.
            self.stream.synchronize()

    def release(self) -> None:
        if self.stall is not None:
            self.stall.release()
            self.stall = None

    def flush(self) -> None:
        self.release()
        for _, event in self.events:
            event.synchronize(WAIT_S)
        self.events.clear()
        self.pools.check()

    def step(self, kind: str, *arguments: object) -> None:
        if kind == "compute":
            self.compute(*arguments)  # type: ignore[arg-type]
        elif kind == "failing copy":
            self.launch_failing(*arguments)  # type: ignore[arg-type]
        elif kind == "wait" and self.events:
            self.release()
            self.events[-1][1].wait(self.stream)
        elif kind == "flush":
            self.flush()
        elif kind == "stall" and self.stream is not None and self.stall is None:
            self.stall = self.simulator.stall(self.stream.npu_stream)  # type: ignore[union-attr]
        elif kind == "release":
            self.release()
        elif kind in ("copy", "copy behind compute", "graph"):
            self.launch(kind, *arguments)  # type: ignore[arg-type]


def play(device: str, simulator: ModuleType | None, steps: list[tuple[object, ...]]) -> None:
    with ExitStack() as closing:
        run = Run(device, simulator, closing)
        for step in steps:
            run.step(*step)  # type: ignore[arg-type]
        run.flush()


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_host_pools_agree_with_the_model(steps: list[tuple[object, ...]]) -> None:
    play("cpu", None, steps)


@pytest.mark.npu
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_npu_pools_agree_with_the_model(
    sim: ModuleType, npu: torch.device, steps: list[tuple[object, ...]]
) -> None:
    play("npu:0", sim, steps)

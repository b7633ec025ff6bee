"""Compute operators in captured graphs: recorded once, computed anew at every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from kernel_cases import CASES, Case, compare

pytestmark = pytest.mark.npu

CAPTURABLE = [
    case.with_scalar(case.scalars[-1]) if case.scalars else case for case in CASES if case.capture
]


@contextmanager
def capture(graph: torch.npu.NPUGraph, stream: torch.npu.Stream) -> Iterator[None]:
    """As torch.npu.graph, without the garbage collection that takes most of its time."""
    with torch.npu.stream(stream):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


@pytest.fixture(scope="module")
def stream() -> Iterator[torch.npu.Stream]:
    made = torch.npu.Stream()
    made.synchronize()
    yield made
    torch.npu.empty_cache()


@pytest.mark.parametrize("case", CAPTURABLE, ids=str)
def test_a_replay_computes_from_what_is_there_then(
    case: Case, stream: torch.npu.Stream, npu: torch.device
) -> None:
    dtype = case.dtypes[-1]
    rounds = [
        case.tensors(torch.Generator().manual_seed(seed), dtype, (2,), (3, 4, 2, 2, 3))
        for seed in (1, 2, 3)
    ]
    static = [tensor.npu() for tensor in rounds[0]]
    case.function(*(tensor.clone() for tensor in static))  # anything that is done once only
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with capture(graph, stream):
        result = case.function(*static)
    for tensors in rounds[1:]:
        for place, tensor in zip(static, tensors):
            place.copy_(tensor)
        torch.npu.synchronize()
        graph.replay()
        torch.npu.synchronize()
        on_cpu = [tensor.clone() for tensor in tensors]
        compare(case, dtype, result, case.function(*on_cpu))
        for place, tensor in zip(static, on_cpu):
            compare(case, dtype, place, tensor)


def test_nothing_is_computed_while_it_is_captured(
    stream: torch.npu.Stream, sim: ModuleType, npu: torch.device
) -> None:
    x = torch.ones(8, device="npu")
    torch.npu.synchronize()
    sim.reset_stats()
    graph = torch.npu.NPUGraph()
    with capture(graph, stream):
        x.add_(1)
        x.mul_(3)
    torch.npu.synchronize()
    assert sim.stats().operators == {}
    assert x.cpu().eq(1).all()
    for times in (1, 2):
        graph.replay()
        torch.npu.synchronize()
        assert sim.stats().operators == {"Add": times, "Mul": times}
        assert sim.stats().operator_bytes["Add"] == times * 64
    assert x.cpu().eq(((1 + 1) * 3 + 1) * 3).all()


def test_operators_of_two_streams_in_one_graph(npu: torch.device) -> None:
    x, y = torch.ones(16, device="npu"), torch.empty(16, device="npu")
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        half = x / 2
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y.copy_(half * 8)
        torch.npu.current_stream().wait_stream(side)
        result = y + x
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert result.cpu().eq(5 * value).all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.nonzero(), "NonZero.*depends on data"),
        (lambda x: x[x > 0], "NonZero.*depends on data"),
        (lambda x: torch.rand_like(x), "during NPU graph capture"),  # torch_npu's own answer
        (lambda x: x.sum().item(), "107027"),
    ],
    ids=["nonzero", "mask", "random", "item"],
)
def test_what_a_graph_cannot_hold(
    function: Callable[[torch.Tensor], object],
    message: str,
    npu: torch.device,
) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with (
        pytest.raises(RuntimeError, match=f"(?s){message}"),
        torch.npu.graph(torch.npu.NPUGraph()),
    ):
        function(x)
    assert x.add(1).cpu().eq(2).all()


def test_a_capture_with_an_unknown_operator_fails_at_its_end(npu: torch.device) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    reached = []

    def body() -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            torch.histc(x, 10, 0, 1)
            x.add_(1)
            reached.append(True)

    with pytest.raises(RuntimeError, match=r"no operator Histogram\(float32\[4\]\)"):
        body()
    assert reached, "the call itself goes through"
    torch.npu.synchronize()
    assert x.cpu().eq(1).all()
    assert x.add(1).cpu().eq(2).all(), "the device is usable"
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
    graph.replay()
    assert y.cpu().eq(2).all(), "and so is capture"

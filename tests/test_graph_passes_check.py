"""The check, on graphs that a pass has broken and on programs that are wrong by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_programs import Tensors, Traced, targets
from torch.fx import Graph, Node

from npu_kv_ops.graph_passes.check import Check, Dependences, GraphOrderError
from npu_kv_ops.graph_passes.merge import Merge
from npu_kv_ops.graph_passes.overlap import Overlap
from npu_kv_ops.graph_passes.reinplace import Reinplace

ops = torch.ops.npu_kv
swap, start, wait = ops.swap_blocks_batch, ops.swap_blocks_start, ops.swap_blocks_wait
BLOCKS, PAYLOAD = 8, 4


def make(layers: int = 3) -> list[Any]:
    numbers = torch.Generator().manual_seed(5)
    pools = [
        [torch.randn(BLOCKS, PAYLOAD, generator=numbers) for _ in range(layers)] for _ in range(2)
    ]
    return [*pools, [torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])], torch.ones(PAYLOAD)]


def step(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Loads, computes and writes, stores, layer by layer; then something else."""
    for host, device in zip(h, d, strict=True):
        swap([host], [device], *ids)
        device.index_put_((ids[0].clamp(min=0),), x)
        x = x + device.sum(0)
        swap([device], [host], *reversed(ids))
    return x * 2


class Passed(list[Any]):
    """The graph of ``step`` behind all passes, and what it has to keep."""

    def __init__(self, function: Callable[..., Any] = step, layers: int = 3) -> None:
        def run(graph: Graph) -> None:
            Reinplace()(graph)
            self.before = Dependences.of(graph)
            Merge()(graph)
            Overlap()(graph)
            self.graph = graph

        Traced(function, run)(*make(layers))
        self.starts, self.waits = (ours(self.graph, name) for name in ("start", "wait"))

    def verify(self) -> None:
        Check().verify(self.graph, self.before)

    def first(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)


def ours(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if f"swap_blocks_{name}" in str(node.target)]


def test_what_the_passes_leave_is_right() -> None:
    passed = Passed()
    assert targets(passed.graph, ["start", "wait"]) == [
        "start",
        *["wait", "start"] * 3,
        *["wait"] * 3,
    ]
    passed.verify()


def drop_a_wait(passed: Passed) -> None:
    passed.graph.erase_node(passed.waits[1])


def wait_behind_the_reader(passed: Passed) -> None:
    passed.first("sum_1").append(passed.waits[0])


def wait_behind_the_writer(passed: Passed) -> None:
    passed.first("index_put").append(passed.waits[0])


def start_above_what_writes_its_source(passed: Passed) -> None:
    write, store, its_wait = passed.first("index_put"), passed.starts[1], passed.waits[3]
    store.args = ([write.args[0]], *store.args[1:])
    its_wait.args = (store, [write.args[0]], *its_wait.args[2:])
    write.prepend(store)


def wait_twice(passed: Passed) -> None:
    with passed.graph.inserting_before(passed.waits[-1]):
        passed.graph.call_function(wait.default, passed.waits[0].args)


def wait_for_another_part(passed: Passed) -> None:
    one, other = passed.waits[:2]
    one.args, other.args = (*one.args[:3], other.args[3]), (*other.args[:3], one.args[3])


def wait_for_a_part_that_is_not_there(passed: Passed) -> None:
    passed.waits[2].args = (*passed.waits[2].args[:3], 7)


def wait_before_its_start(passed: Passed) -> None:
    passed.starts[1].prepend(passed.waits[3])


def wait_for_something_else(passed: Passed) -> None:
    passed.waits[0].args = (passed.first("clamp"), *passed.waits[0].args[1:])


def drop_a_transfer(passed: Passed) -> None:
    passed.graph.erase_node(passed.waits[-1])
    passed.graph.erase_node(passed.starts[-1])


def drop_a_tensor(passed: Passed) -> None:
    passed.starts[0].args = (
        *(list(side)[:2] for side in passed.starts[0].args[:2]),
        *passed.starts[0].args[2:4],
        [1, 1],
    )
    passed.graph.erase_node(passed.waits[2])


def drop_a_write(passed: Passed) -> None:
    node = passed.first("index_put_1")
    node.replace_all_uses_with(node.args[0])
    passed.graph.erase_node(node)


def take_other_ids(passed: Passed) -> None:
    src, dst, a, b, *rest = passed.starts[0].args
    passed.starts[0].args = (src, dst, b, a, *rest)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (drop_a_wait, "is never waited for: part 1 of 3"),
        (wait_behind_the_reader, "while its blocks are under way"),
        (wait_behind_the_writer, "index_put touches .* while its blocks are under way"),
        (start_above_what_writes_its_source, "index_put writes .* blocks are under way"),
        (wait_twice, "waits for part 0 .* again"),
        (wait_for_another_part, "with other tensors"),
        (wait_for_a_part_that_is_not_there, "waits for part 7 of .*, which has 3"),
        (wait_before_its_start, "comes before"),
        (wait_for_something_else, "waits for clamp, which is no swap_blocks_start"),
        (drop_a_transfer, "is gone"),
        (drop_a_tensor, "is gone"),
        (drop_a_write, "index_put_1 is gone"),
        (take_other_ids, "is gone"),
    ],
)
def test_a_broken_graph_is_refused(spoil: Callable[[Passed], None], text: str) -> None:
    passed = Passed()
    spoil(passed)
    with pytest.raises(GraphOrderError, match=text):
        passed.verify()


def two_swaps(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
    x = x + d[0].sum(0)
    swap([h[0]], [d[0]], *ids)
    swap([d[0]], [h[1]], *reversed(ids))
    return x + d[2].sum(0)


def test_a_transfer_may_not_pass_another_that_it_depends_on() -> None:
    passed = Passed(two_swaps)
    passed.verify()
    first, second = [
        node for node in passed.graph.nodes if "batch" in str(node.target)
    ] + passed.starts
    moved = [second, *(node for node in passed.waits if node.args[0] is second)]
    for node in moved:
        first.prepend(node)
    with pytest.raises(GraphOrderError, match=r"must be over before .* comes first now"):
        passed.verify()


def test_a_transfer_may_not_pass_who_reads_what_it_overwrites() -> None:
    passed = Passed(two_swaps)
    passed.first("sum_1").prepend(ours(passed.graph, "batch")[0])
    with pytest.raises(GraphOrderError, match="sum_1 must be over before"):
        passed.verify()


def test_a_transfer_that_copies_nothing_may_go() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
        swap.static([h[0]], [d[0]], [-1, 2], [1, -1])
        swap.static([h[1]], [d[1]], [], [])
        return x + d[0].sum(0) + d[1].sum(0)

    def run(graph: Graph) -> None:
        Reinplace()(graph)
        before = Dependences.of(graph)
        for node in ours(graph, "batch"):
            graph.erase_node(node)
        Check().verify(graph, before)

    Traced(function, run)(*make())


def test_dependences_grow_with_the_graph_and_no_faster() -> None:
    def edges(layers: int) -> int:
        return len(Passed(layers=layers).before.edges)

    assert edges(16) - edges(8) == 2 * (edges(8) - edges(4))


# Programs that are wrong by themselves. They are seen as functional graphs.


def no_wait(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    start(h, d, *ids)
    return x * 2


def one_part_is_forgotten(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids, [1, 2])
    wait(ticket, h[:1], d[:1], 0)


def waited_for_twice(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids)
    wait(ticket, h, d)
    wait(ticket, h, d)


def other_tensors(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h[:2], d[:2], *ids)
    wait(ticket, h[1:], d[1:])


def fewer_tensors(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids)
    wait(ticket, h[:2], d[:2])


def ticket_of_something_else(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    wait(ids[0].sum(), h, d)


def destination_is_read(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids)
    x = x + d[1].sum(0)
    wait(ticket, h, d)
    return x


def destination_is_written(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids)
    d[1].add_(1)
    wait(ticket, h, d)


def source_is_written(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(d, h, *ids)
    d[1].index_put_((ids[1],), x)
    wait(ticket, d, h)


def another_transfer_is_in_the_way(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    ticket = start(h, d, *ids)
    swap([d[0]], [h[0]], *ids)
    wait(ticket, h, d)


WRONG = [
    (no_wait, "is never waited for"),
    (one_part_is_forgotten, "part 1 of 2 has no swap_blocks_wait"),
    (waited_for_twice, "again"),
    (other_tensors, "with other tensors"),
    (fewer_tensors, "with other tensors"),
    (ticket_of_something_else, "is no swap_blocks_start"),
    (destination_is_read, "touches .* while its blocks are under way"),
    (destination_is_written, "touches .* while its blocks are under way"),
    (source_is_written, "writes .* while its blocks are under way"),
    (another_transfer_is_in_the_way, "while its blocks are under way"),
]


@pytest.mark.parametrize(("function", "text"), WRONG, ids=[one.__name__ for one, _ in WRONG])
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in place"])
def test_a_wrong_program_is_refused(function: Any, text: str, in_place: bool) -> None:
    def run(graph: Graph) -> None:
        if in_place:
            Reinplace()(graph)
        Check()(graph)

    with pytest.raises(GraphOrderError, match=text):
        Traced(function, run)(*make())


def ticket_leaves(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    """The wait is in another graph."""
    return start(h, d, *ids)


def ticket_comes(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    wait(x, h, d)


@pytest.mark.parametrize("function", [ticket_leaves, ticket_comes])
def test_halves_in_two_graphs_are_for_the_operators_to_judge(function: Any) -> None:
    def run(graph: Graph) -> None:
        Check()(graph)
        raise NotImplementedError

    arguments = make()
    arguments[3] = torch.tensor(0)
    with pytest.raises(NotImplementedError):
        Traced(function, run)(*arguments)


def test_other_memory_may_be_touched_while_blocks_are_under_way() -> None:
    def run(graph: Graph) -> None:
        Reinplace()(graph)
        Check()(graph)

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        ticket = start([h[0]], [d[0]], *ids)
        x = x + h[0].sum(0)
        d[1].add_(x)
        wait(ticket, [h[0]], [d[0]])
        return x

    Traced(function, run)(*make())

"""The passes merge and overlap: what moves, what stays, and what either would spoil.

Every program is run as it is, and from its graph behind the passes with copies at their earliest
and at their latest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_programs import Tensors, Traced, leaves, targets
from torch.fx import Graph, Node

from npu_kv_ops.graph_passes import memory
from npu_kv_ops.graph_passes.check import Check, Dependences
from npu_kv_ops.graph_passes.merge import Merge
from npu_kv_ops.graph_passes.overlap import Overlap
from npu_kv_ops.graph_passes.reinplace import Reinplace

ops = torch.ops.npu_kv
swap = ops.swap_blocks_batch
LAYERS, BLOCKS, PAYLOAD = 3, 8, 4
MERGE: tuple[type, ...] = (Merge,)
OVERLAP: tuple[type, ...] = (Overlap,)
Function = Callable[[Tensors, Tensors, Tensors, torch.Tensor], Any]


def make() -> list[Any]:
    """Host pools, device pools, two columns of ids, x."""
    numbers = torch.Generator().manual_seed(5)
    pools = [
        [torch.randn(BLOCKS, PAYLOAD, generator=numbers) for _ in range(LAYERS)] for _ in range(2)
    ]
    return [*pools, [torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])], torch.ones(PAYLOAD)]


def behind(
    function: Function,
    passes: Sequence[type],
    arguments: Callable[[], list[Any]] = make,
    edit: Callable[[Graph], Any] | None = None,
) -> Graph:
    """The graph behind some passes, after it was seen to compute what the function does."""
    kept: list[Graph] = []

    def run(graph: Graph) -> None:
        Reinplace()(graph)
        if edit is not None:
            edit(graph)
        before = Dependences.of(graph)
        for one in passes:
            one()(graph)
            Check().verify(graph, before)
        kept.append(graph)

    expected_arguments = arguments()
    expected = leaves([function(*expected_arguments), expected_arguments])
    traced = Traced(function, run)
    for late in (False, True):
        found_arguments = arguments()
        found = leaves([traced(*found_arguments, late=late), found_arguments])
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
    return kept[0]


def ours(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if f"swap_blocks_{name}" in str(node.target)]


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


# merge


def per_layer(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
    for host, device in zip(h, d, strict=True):
        swap([host], [device], *ids)
        x = x + device.sum(0)
    return x


def test_swaps_of_one_direction_with_the_same_ids_become_one() -> None:
    graph = behind(per_layer, MERGE)
    assert targets(graph) == ["swap", *["sum", "add"] * LAYERS]
    (one,) = ours(graph, "batch")
    pools = names(node for node in graph.nodes if node.op == "placeholder")
    assert [len(names) for names in one.args[:2]] == [LAYERS, LAYERS]
    assert {*names(one.args[0]), *names(one.args[1])} < set(pools)


def test_pools_that_are_views_move_up_with_their_swap() -> None:
    def function(h: torch.Tensor, d: torch.Tensor, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
        return per_layer(list(h.unbind(0)), list(d.unbind(0)), ids, x)

    def stacked() -> list[Any]:
        h, d, *rest = make()
        return [torch.stack(h), torch.stack(d), *rest]

    assert targets(behind(function, MERGE, stacked)) == ["swap", *["sum", "add"] * LAYERS]


def test_constant_ids_are_the_same_when_they_are_equal() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
        for layer, block in enumerate([1, 1, 2]):
            swap.static([h[layer]], [d[layer]], [block, 7], [5, 3])
            x = x + d[layer].sum(0)
        return x

    assert targets(behind(function, MERGE)) == ["swap", *["sum", "add"] * 2, "swap", "sum", "add"]


def other_ids(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap([h[1]], [d[1]], *reversed(ids))


def source_is_written(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap([d[2]], [h[1]], *reversed(ids))
    swap([h[1]], [d[1]], *ids)


def destination_is_read(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    x = x + d[1].sum(0)
    swap([h[1]], [d[1]], *ids)
    return x


def destination_is_written(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap.static([h[2]], [d[1]], [6], [3])
    swap([h[1]], [d[1]], *ids)


def destination_is_a_source_of_another(
    h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor
) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap.static([d[1]], [h[2]], [5], [3])
    swap([h[1]], [d[1]], *ids)


def destination_of_the_first_is_the_source(
    h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor
) -> Any:
    ids = [ids[0], ids[0].flip(0)]
    swap([h[0]], [d[0]], *ids)
    swap([d[0]], [h[1]], *ids)


def source_of_the_first_is_the_destination(
    h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor
) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap([h[1]], [h[0]], ids[0], ids[0])
    swap([h[1]], [h[0]], *ids)


def destinations_overlap(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    swap([h[1]], [d[0]], *ids)


def pool_is_made_later(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    made = d[1] * 2
    swap([h[1]], [made], *ids)
    return made + 1


def ids_are_written(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
    swap([h[0]], [d[0]], *ids)
    ids[1].copy_(ids[0] + 5)
    swap([h[1]], [d[1]], *ids)


@pytest.mark.parametrize(
    "function",
    [
        other_ids,
        source_is_written,
        destination_is_read,
        destination_is_written,
        destination_is_a_source_of_another,
        destination_of_the_first_is_the_source,
        source_of_the_first_is_the_destination,
        destinations_overlap,
        pool_is_made_later,
        ids_are_written,
    ],
)
def test_swaps_stay_apart(function: Function) -> None:
    calls: list[int] = []
    behind(function, MERGE, edit=lambda graph: calls.append(len(ours(graph, "batch"))))
    assert len(ours(behind(function, MERGE), "batch")) == calls[0]


def put_unknown(graph: Graph) -> None:
    """What no pass understands, before the second swap."""
    second = ours(graph, "batch")[1]
    with graph.inserting_before(second):
        graph.call_function(id, (next(iter(graph.nodes)),))


def test_nothing_moves_over_what_is_not_understood() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([h[0]], [d[0]], *ids)
        y = x * 3
        swap([h[1]], [d[1]], *ids)
        z = y * 3
        return z, d[1] + z

    merged = behind(function, MERGE, edit=put_unknown)
    assert targets(merged) == ["swap", "mul", "id", "swap", "mul", "add"]
    apart = behind(function, OVERLAP, edit=put_unknown)
    assert targets(apart) == ["start", "mul", "wait", "id", "start", "mul", "wait", "add"]


def test_halves_written_by_hand_are_left_as_they_are() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([h[0]], [d[0]], *ids)
        ticket = ops.swap_blocks_start([h[1]], [d[1]], *ids)
        y = x * 3
        ops.swap_blocks_wait(ticket, [h[1]], [d[1]])
        swap([h[2]], [d[2]], *ids)
        return y + d[2]

    graph = behind(function, MERGE)
    assert targets(graph) == ["swap", "start", "mul", "wait", "add"]


def test_a_swap_whose_memory_is_unknown_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def forget(graph: Graph) -> None:
        second = ours(graph, "batch")[1]
        del second.args[1][0].meta["val"]

    with caplog.at_level(logging.INFO, "npu_kv_ops.graph_passes"):
        graph = behind(per_layer, (Merge, Overlap), edit=forget)
    assert len(ours(graph, "batch")) >= 1
    for name in ("merge", "overlap"):
        assert any(
            record.name.endswith(name) and "is unknown" in record.message
            for record in caplog.records
        )


# overlap


def test_layers_compute_while_later_ones_are_under_way() -> None:
    graph = behind(per_layer, (Merge, Overlap))
    assert targets(graph) == ["start", *["wait", "sum", "add"] * LAYERS]
    (start,) = ours(graph, "start")
    assert start.args[4] == [1] * LAYERS
    for part, wait in enumerate(ours(graph, "wait")):
        pools = [start.args[0][part]], [start.args[1][part]]
        assert wait.args == (start, *pools, part)


def test_a_load_starts_as_soon_as_its_ids_are_there() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        x = x * 2
        blocks = ids[0] + 0
        x = x * 3
        swap(h, d, blocks, ids[1])
        return x + d[0].sum(0)

    graph = behind(function, OVERLAP)
    assert targets(graph) == ["mul", "add", "start", "mul", "wait", "sum", "add", "wait"]
    assert ours(graph, "start")[0].args[4] == [1, 2]


def test_stores_end_with_the_graph() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([d[0]], [h[0]], *ids)
        swap([d[1]], [h[1]], *reversed(ids))
        return x * 2 + d[0]

    graph = behind(function, OVERLAP)
    assert targets(graph) == ["start", "start", "mul", "add", "wait", "wait"]


def test_a_swap_that_is_waited_for_at_once_stays_whole() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap(h, d, *ids)
        return torch.cat(d)

    assert targets(behind(function, OVERLAP)) == ["swap", "cat"]


def test_the_last_swap_of_a_graph_stays_whole() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        x = d[0].sum(0)
        swap([h[0]], [d[0]], *ids)
        return x

    assert targets(behind(function, OVERLAP)) == ["sum", "swap"]


def test_parts_are_in_the_order_in_which_they_are_needed() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap(h, d, *ids)
        x = x * 2 + d[2].sum(0)
        return x + (d[0] + d[1]).sum(0)

    graph = behind(function, OVERLAP)
    assert targets(graph) == [
        *["start", "mul", "wait", "sum", "add"],
        *["wait", "add", "sum", "add"],
    ]
    (start,) = ours(graph, "start")
    assert start.args[4] == [1, 2]
    h, d = (names(side) for side in start.args[:2])
    assert names(ours(graph, "wait")[0].args[2]) == d[:1]
    assert [h.index(name) for name in names(ours(graph, "wait")[1].args[1])] == [1, 2]


def test_reading_a_source_needs_no_wait() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([d[0]], [h[0]], *ids)
        return x + d[0].sum(0)

    assert targets(behind(function, OVERLAP)) == ["start", "sum", "add", "wait"]


def test_a_store_is_waited_for_before_its_source_is_written() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([d[0]], [h[0]], *ids)
        x = x * 2
        d[0].index_put_((ids[1],), x)
        return d[0] * 2

    assert targets(behind(function, OVERLAP))[:4] == ["start", "mul", "wait", "index_put"]


def test_a_load_is_waited_for_before_its_destination_is_written() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([h[0]], [d[0]], *ids)
        x = x * 2
        d[0].copy_(x.expand(BLOCKS, PAYLOAD))
        return x

    found = targets(behind(function, OVERLAP), ["start", "mul", "wait", "copy_"])
    assert found == ["start", "mul", "wait", "copy_"]


def test_a_store_follows_what_writes_its_source() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        for layer in range(2):
            d[layer].index_put_((ids[1],), x)
            x = x + d[layer].sum(0)
            swap([d[layer]], [h[layer]], *ids)
        return x

    graph = behind(function, (Merge, Overlap))
    assert targets(graph) == [
        *["index_put", "start", "sum", "add"] * 2,
        *["wait", "copy_"] * 2,
    ]


def test_transfers_that_conflict_are_not_under_way_at_once() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([d[0]], [h[0]], *ids)
        swap([h[0]], [d[1]], *reversed(ids))
        x = x * 2
        return x + d[1]

    assert targets(behind(function, OVERLAP)) == ["swap", "start", "mul", "wait", "add"]


def test_a_load_into_blocks_that_are_stored_first_is_a_layer_ahead() -> None:
    """Evict, then load into the freed blocks; the stream does not wait for all stores at once."""

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        other = [ids[1] - 1, ids[0]]
        for layer in range(LAYERS):
            swap([d[layer]], [h[layer]], *ids)
            swap([h[layer]], [d[layer]], *other)
            x = x + d[layer].sum(0)
        return x

    graph = behind(function, (Merge, Overlap))
    assert targets(graph) == [
        *["start", "sub", *["wait", "start"] * 2],
        *["wait", "sum", "add", "wait", "start"],
        *["wait", "sum", "add"] * 2,
    ]
    assert [len(start.args[0]) for start in ours(graph, "start")] == [LAYERS, 1, 1, 1]


def test_stores_of_what_was_loaded_stay_behind_their_loads() -> None:
    """Joined at the first layer, they would wait for the loads of all layers."""

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        for layer in range(LAYERS):
            swap([h[layer]], [d[layer]], *ids)
            x = x + d[layer].sum(0)
            swap([d[layer]], [h[layer]], *reversed(ids))
        return x

    graph = behind(function, (Merge, Overlap))
    assert targets(graph)[:5] == ["start", "wait", "start", "sum", "add"]
    assert targets(graph, ["start"]) == ["start"] * (1 + LAYERS)


def test_swaps_that_move_up_to_one_place_keep_their_order() -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        x = x * 2
        swap([h[0]], [d[0]], *ids)
        x = x * 3 + d[0].sum(0)
        swap([h[1]], [d[1]], *reversed(ids))
        return x + d[1].sum(0)

    graph = behind(function, OVERLAP)
    assert targets(graph) == [
        *["start", "start", "mul", "mul", "wait", "sum", "add"],
        *["wait", "sum", "add"],
    ]
    first, second = ours(graph, "start")
    assert first.args[2] is second.args[3]
    assert ours(graph, "wait")[0].args[0] is first


def test_pools_of_one_storage_are_told_apart() -> None:
    def shared() -> list[Any]:
        h, d, *rest = make()
        return [list(torch.stack(h).unbind(0)), list(torch.stack(d).unbind(0)), *rest]

    assert targets(behind(per_layer, (Merge, Overlap), shared)) == [
        "start",
        *["wait", "sum", "add"] * LAYERS,
    ]


def test_a_decoder_step_loads_computes_and_stores() -> None:
    """As an engine has it: a layer's blocks come, its new token is written, others are stored."""

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        for layer in range(LAYERS):
            swap([h[layer]], [d[layer]], *ids)
            d[layer].index_put_((ids[0].clamp(min=0),), x)
            x = x + d[layer].sum(0)
            swap([d[layer]], [h[layer]], *reversed(ids))
        return x

    graph = behind(function, (Merge, Overlap))
    assert targets(graph, ["start", "wait", "swap"]) == [
        *["start", *["wait", "start"] * LAYERS, *["wait"] * LAYERS]
    ]
    assert targets(graph, ["clone", "functional"]) == []


@pytest.mark.parametrize(
    "other",
    [torch.zeros_like, lambda pool: pool.new_ones(PAYLOAD), lambda pool: torch.full_like(pool, 2)],
    ids=["zeros_like", "new_ones", "full_like"],
)
def test_what_takes_only_the_size_of_a_pool_does_not_touch_it(
    other: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        ticket = ops.swap_blocks_start(h, d, *ids)
        made = other(d[0]) + x
        ops.swap_blocks_wait(ticket, h, d)
        return made + d[0]

    def by_the_pass(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        made = other(d[0])
        swap(h, d, *ids)
        y = other(d[1]) + made
        d[2].copy_(other(d[2]))
        return y + x

    assert targets(behind(function, OVERLAP), ["start", "wait"]) == ["start", "wait"]
    found = targets(behind(by_the_pass, OVERLAP))
    assert found[0] == "start"
    assert found.index("wait") > found.index("add")


def test_tensors_that_lie_side_by_side_do_not_overlap() -> None:
    """Keys and values of one block, a call each."""

    def interleaved() -> list[Any]:
        host, device, *others = make()
        sides = [torch.stack(pools[:2], dim=1) for pools in (host, device)]
        return [*([side[:, half] for half in (0, 1)] for side in sides), *others]

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([h[0]], [d[0]], *ids)
        x = x * d[0].sum(0)
        swap([h[1]], [d[1]], *ids)
        return x * d[1].sum(0)

    graph = behind(function, (*MERGE, *OVERLAP), interleaved)
    assert targets(graph, ["start", "wait"]) == ["start", "wait", "wait"]


def test_tensors_that_share_bytes_of_a_block_do() -> None:
    def interleaved() -> list[Any]:
        host, device, *others = make()
        whole = torch.cat(device[:2], dim=1)
        return [host, [whole[:, :PAYLOAD], whole[:, 1 : PAYLOAD + 1]], *others]

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap([h[0]], [d[0]], *ids)
        swap([h[1]], [d[1]], *ids)
        return x

    found = targets(behind(function, (*MERGE, *OVERLAP), interleaved))
    assert sum(name in ("swap", "functional", "start") for name in found) == 2


@torch.library.custom_op("npu_kv_tests::attend", mutates_args=("out",))
def attend(out: torch.Tensor, layer: int) -> None:
    """Finds its pool by the number of the layer, as an engine's attention does."""
    out.add_(_named[layer].sum(0))


_named: list[torch.Tensor] = []


def test_nothing_moves_over_an_operator_that_may_know_a_pool() -> None:
    def arguments() -> list[Any]:
        made = make()
        _named[:] = made[1]
        return made

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        x = x.clone()
        for layer in range(LAYERS):
            swap([h[layer]], [d[layer]], *ids)
            torch.ops.npu_kv_tests.attend(x, layer)
        return x

    found = targets(behind(function, (*MERGE, *OVERLAP), arguments))
    calls = [name for name in found if name in ("swap", "start", "functional")]
    assert calls in (
        [first, *["functional", "swap"] * 2, "functional"] for first in ("swap", "start")
    )


def test_an_operator_that_is_declared_is_no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_declared", set())

    def function(h: Tensors, d: Tensors, ids: Tensors, x: torch.Tensor) -> Any:
        swap(h, d, *ids)
        y = torch.ops.npu_kv_tests.double(x)
        return y + d[0]

    assert targets(behind(function, OVERLAP), ["swap", "start"]) == ["swap"]
    memory.touches_only_its_arguments(torch.ops.npu_kv_tests.double)
    assert targets(behind(function, OVERLAP), ["swap", "start", "double", "wait"]) == [
        "start",
        "double",
        *["wait"] * 2,
    ]
    with pytest.raises(TypeError, match="no operator"):
        memory.touches_only_its_arguments(torch.add)


@torch.library.custom_op("npu_kv_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)

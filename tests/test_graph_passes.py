"""The pass reinplace, on graphs as the compilers of torch_npu show them, made here on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from graph_programs import Tensors, Traced, leaves, targets
from torch._dynamo.backends.common import aot_autograd

from npu_kv_ops.graph_passes import Reinplace, npugraph_ex_options
from npu_kv_ops.graph_passes.ranges import storage_of

ops = torch.ops.npu_kv
swap = ops.swap_blocks_batch
BLOCKS, PAYLOAD = 8, 4
Pass = Callable[[torch.fx.Graph], Any]


class Recorded:
    """Reinplace, and what it left."""

    def __init__(self) -> None:
        self.changed = 0
        self.graph: torch.fx.Graph

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.changed = Reinplace()(graph)
        self.graph = graph

    @property
    def clones(self) -> int:
        return len(targets(self.graph, ["clone", "functional"]))


def pool(seed: int) -> torch.Tensor:
    return torch.randn(BLOCKS, PAYLOAD, generator=torch.Generator().manual_seed(seed))


def layers(shared: bool, seed: int) -> Tensors:
    made = [pool(seed + i) for i in range(3)]
    return list(torch.stack(made).unbind(0)) if shared else made


def check(function: Callable[..., Any], make: Callable[[], list[Any]]) -> Recorded:
    """The pass changes neither results nor what is written."""
    expected_arguments, found_arguments = make(), make()
    expected = leaves([function(*expected_arguments), expected_arguments])
    recorded = Recorded()
    found = leaves([Traced(function, recorded)(*found_arguments), found_arguments])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    return recorded


IDS = torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])


@pytest.mark.parametrize("shared", [True, False], ids=["one storage", "a storage each"])
def test_a_call_is_put_in_place(shared: bool) -> None:
    def function(src: Tensors, dst: Tensors, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        before = dst[0] * 2
        swap(src, dst, a, b)
        return before + dst[0] + dst[2]

    recorded = check(function, lambda: [layers(shared, 1), layers(shared, 9), *IDS])
    assert recorded.changed == 1
    assert targets(recorded.graph) == ["mul", "swap", "add", "add"]


def test_calls_that_follow_one_another_are_put_in_place() -> None:
    def function(host: Tensors, dev: Tensors, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        swap(host, dev, a, b)
        between = dev[1] + 1
        swap(dev, host, b, a)
        swap(host, dev, b, a)
        return between + dev[1]

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9), *IDS])
    assert recorded.changed == 3
    assert targets(recorded.graph) == ["swap", "add", "swap", "swap", "add"]


def test_a_start_and_its_waits_are_put_in_place() -> None:
    def function(src: Tensors, dst: Tensors, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ticket = ops.swap_blocks_start(src, dst, a, b, [1, 2])
        unrelated = a * 2
        ops.swap_blocks_wait(ticket, src[:1], dst[:1])
        first = dst[0] + 1
        ops.swap_blocks_wait(ticket, src[1:], dst[1:], 1)
        return first + dst[2] + unrelated.sum()

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9), *IDS])
    assert recorded.changed == 3
    assert targets(recorded.graph, ["functional", "start", "wait", "clone", "copy_"]) == [
        "start",
        "wait",
        "wait",
    ]
    start, *waits = [n for n in recorded.graph.nodes if "swap_blocks" in str(n.target)]
    assert [wait.args[0] for wait in waits] == [start, start]
    assert start.args[4] == [1, 2]
    assert start.meta["val"].dtype == torch.int64


def test_views_of_one_pool_are_made_once() -> None:
    def function(host: torch.Tensor, dev: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        for layer in range(3):
            swap([host[layer]], [dev[layer]], a, b)
            dev[layer].sum()
        swap(list(host.unbind(0)), list(dev.unbind(0)), b, a)
        return dev[1] + 1

    recorded = check(
        function, lambda: [torch.stack(layers(True, 1)), torch.stack(layers(True, 9)), *IDS]
    )
    assert recorded.changed == 4
    assert targets(recorded.graph, ["as_strided"]) == ["as_strided"] * 6


def test_traced_values_tell_afterwards_what_lies_where() -> None:
    """Whoever asks next finds that views of a result are views of the pool."""

    def function(host: Tensors, dev: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        swap(host, [dev[1]], a, b)
        return dev[1][2:4].sum() + dev.view(-1)[3] + torch.stack(dev.unbind(0)[1:]).sum()

    recorded = check(function, lambda: [[pool(1)], torch.stack(layers(True, 9)), *IDS])
    pools = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    known = {storage_of(node.meta["val"]) for node in pools}
    views = {"as_strided", "slice", "select", "view", "unbind"}
    named = [node for node in recorded.graph.nodes if _name(node) in views]
    assert len(named) > 4
    for node in named:
        values = torch.utils._pytree.tree_leaves(node.meta["val"])
        assert {storage_of(value) for value in values} <= known


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def test_a_pool_may_be_overwritten_later() -> None:
    def function(
        src: Tensors, dst: Tensors, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        swap(src, dst, a, b)
        y = dst[0].sum(0)
        dst[0].index_put_((b,), x)
        dst[1].copy_(src[0])
        return y

    make = lambda: [layers(True, 1), layers(False, 9), *IDS, torch.ones(PAYLOAD)]  # noqa: E731
    assert check(function, make).clones == 0


def without_clones(recorded: Recorded) -> Pass:
    """What a compiler does that takes clones for needless (pytorch #198031), then the pass."""

    def run(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        recorded(graph)

    return run


def old_value(d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
    old = d[0].clone()
    swap(h, d, a, b)
    return old + 1


def old_part_between_two(d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
    swap(h, d, a, b)
    old = d[0][2:6].clone()
    swap(h, d, b, a)
    return old + 1


def old_part_as_source(d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
    swap(h, d, a, b)
    copies = [layer[0:8].clone() for layer in d]
    swap(copies, d, a, b)
    return copies[0] + 1


def snapshot_of_what_is_overwritten(
    d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor
) -> Any:
    swap(h, d, a, b)
    snapshot = d[0].clone()
    d[0].add_(1)
    return snapshot


@pytest.mark.parametrize(
    "function",
    [old_value, old_part_between_two, old_part_as_source, snapshot_of_what_is_overwritten],
)
def test_an_old_value_that_is_needed_is_kept(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As with the functional graph, in which every value stays what it is."""
    plain, passed = ([layers(True, 9), layers(True, 1), *IDS] for _ in range(2))
    expected = leaves([Traced(function)(*plain), plain])
    recorded = Recorded()
    with caplog.at_level(logging.INFO, "npu_kv_ops.graph_passes.reinplace"):
        found = leaves([Traced(function, without_clones(recorded))(*passed), passed])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert "stays functional" in caplog.text


def test_static_ids_are_put_in_place() -> None:
    def function(src: Tensors, dst: Tensors) -> torch.Tensor:
        swap.static(src, dst, [1, 2], [5, 3])
        return dst[1] + 1

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9)])
    assert recorded.changed == 1


def test_other_operators_are_not_touched() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    assert check(function, lambda: [pool(1)]).changed == 0


def parts_of_pools(d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
    swap([x[2:6] for x in h[:2]], [x[1:7] for x in d[:2]], a, b)
    return d[1] * 2


def test_parts_of_pools_that_begin_inside_their_storage_are_those_that_were_meant() -> None:
    """torch regenerates other blocks: it counts from the storage, not from the pool."""
    ids = torch.tensor([0, 3]), torch.tensor([2, 5])
    recorded = check(parts_of_pools, lambda: [layers(True, 9), layers(True, 1), *ids])
    assert recorded.clones == 0


def test_parts_of_pools_are_right_in_a_call_that_stays_functional() -> None:
    def function(d: Tensors, h: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
        old = d[1].clone()
        return parts_of_pools(d, h, a, b) + old

    ids = torch.tensor([0, 3]), torch.tensor([2, 5])
    plain, passed = ([layers(True, 9), layers(True, 1), *ids] for _ in range(2))
    expected = leaves([function(*plain), plain])
    recorded = Recorded()
    found = leaves([Traced(function, without_clones(recorded))(*passed), passed])
    assert "functional" in targets(recorded.graph)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_sizes_may_be_symbols() -> None:
    """As Dynamo traces them with ``dynamic=True``; without new guards."""
    recorded = Recorded()

    def compiler(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        recorded(module.graph)
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)

    def function(src: torch.Tensor, dst: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        swap([src[1], src[0][1:]], [dst[0], dst[1][1:]], a, b)
        return dst[0][1:].sum() + dst[1].sum()

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for blocks in (8, 11):
        expected, found = ([torch.rand(2, blocks, PAYLOAD) for _ in range(2)] for _ in range(2))
        for one, other in zip(expected, found, strict=True):
            other.copy_(one)
        with torch.no_grad():
            assert torch.equal(function(*expected, *IDS), compiled(*found, *IDS))
        assert torch.equal(expected[1], found[1])
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in recorded.graph.nodes)
    assert recorded.changed == 1
    assert recorded.clones == 0


def test_options_keep_what_the_user_has() -> None:
    seen: list[str] = []

    def own(module: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        seen.append("own")

    options = npugraph_ex_options(clone_input=False, post_grad_custom_post_pass=own)
    assert options["clone_input"] is False
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    options["post_grad_custom_post_pass"](module, [], None)
    assert seen == ["own"]

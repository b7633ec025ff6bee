"""The passes on graphs as the compilers of torch_npu show them, made here on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import npu_kv_ops.ops  # noqa: F401 - registers the operator
from npu_kv_ops.graph_passes import Reinplace, npugraph_ex_options

swap = torch.ops.npu_kv.swap_blocks_batch
BLOCKS, PAYLOAD = 8, 4
Pass = Callable[[torch.fx.Graph], Any]


def run_with(function: Callable[..., Any], *arguments: Any, graph_pass: Pass | None) -> Any:
    """Runs ``function`` through AOT, with the pass on its functional graph and no other change."""

    def compiler(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if graph_pass is not None:
            graph_pass(module.graph)
            module.graph.lint()
            module.recompile()
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    # As npugraph_ex asks for it: the graph itself writes its inputs.
    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True)(*arguments)


class Recorded:
    """Reinplace, and what it left."""

    def __init__(self) -> None:
        self.changed = 0
        self.targets: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.changed = Reinplace()(graph)
        self.targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]

    @property
    def clones(self) -> int:
        return sum("clone" in target or "auto_functionalized" in target for target in self.targets)


def pool(seed: int) -> torch.Tensor:
    return torch.randn(BLOCKS, PAYLOAD, generator=torch.Generator().manual_seed(seed))


def layers(shared: bool, seed: int) -> list[torch.Tensor]:
    made = [pool(seed + i) for i in range(3)]
    return list(torch.stack(made).unbind(0)) if shared else made


def check(function: Callable[..., Any], make: Callable[[], list[Any]]) -> Recorded:
    """The pass changes neither results nor what is written."""
    expected_arguments, found_arguments = make(), make()
    expected = function(*expected_arguments)
    recorded = Recorded()
    found = run_with(function, *found_arguments, graph_pass=recorded)
    flatten = torch.utils._pytree.tree_leaves
    for one, other in zip(
        flatten([expected, expected_arguments]), flatten([found, found_arguments])
    ):
        assert torch.equal(one, other)
    return recorded


IDS = torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])


def test_a_call_is_put_in_place() -> None:
    def function(
        src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        before = dst[0] * 2
        swap(src, dst, a, b)
        return before + dst[0] + dst[2]

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9), *IDS])
    assert recorded.changed == 1
    assert recorded.clones == 0
    assert not any("copy_" in target for target in recorded.targets)


def test_calls_that_follow_one_another_are_put_in_place() -> None:
    def function(
        host: list[torch.Tensor], dev: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        swap(host, dev, a, b)
        between = dev[1] + 1
        swap(dev, host, b, a)
        swap(host, dev, b, a)
        return between + dev[1]

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9), *IDS])
    assert recorded.changed == 3
    assert recorded.clones == 0


def test_what_compilers_do_well_is_left_to_them() -> None:
    def function(
        src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        swap(src, dst, a, b)
        return dst[0] + 1

    assert check(function, lambda: [layers(False, 1), layers(False, 9), *IDS]).changed == 0


def without_clones(recorded: Recorded) -> Pass:
    """What a compiler does that takes clones for needless (pytorch #198031), then the pass."""

    def run(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        recorded(graph)

    return run


def old_value(
    d: list[torch.Tensor], h: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> Any:
    old = d[0].clone()
    swap(h, d, a, b)
    return old + 1


def old_part_between_two(
    d: list[torch.Tensor], h: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> Any:
    swap(h, d, a, b)
    old = d[0][2:6].clone()
    swap(h, d, b, a)
    return old + 1


def old_part_as_source(
    d: list[torch.Tensor], h: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> Any:
    swap(h, d, a, b)
    copies = [layer[0:8].clone() for layer in d]
    swap(copies, d, a, b)
    return copies[0] + 1


def snapshot_of_what_is_overwritten(
    d: list[torch.Tensor], h: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
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
    expected = run_with(function, *plain, graph_pass=None)
    recorded = Recorded()
    with caplog.at_level(logging.INFO, "npu_kv_ops.graph_passes.reinplace"):
        found = run_with(function, *passed, graph_pass=without_clones(recorded))
    assert torch.equal(found, expected)
    for one, other in zip([*plain[0], *plain[1]], [*passed[0], *passed[1]]):
        assert torch.equal(one, other)
    assert "stays functional" in caplog.text


def test_static_ids_are_put_in_place() -> None:
    def function(src: list[torch.Tensor], dst: list[torch.Tensor]) -> torch.Tensor:
        swap.static(src, dst, [1, 2], [5, 3])
        return dst[1] + 1

    recorded = check(function, lambda: [layers(True, 1), layers(True, 9)])
    assert recorded.changed == 1


def test_other_operators_are_not_touched() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    assert check(function, lambda: [pool(1)]).changed == 0


def test_options_keep_what_the_user_has() -> None:
    seen: list[str] = []

    def own(module: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        seen.append("own")

    options = npugraph_ex_options(clone_input=False, post_grad_custom_post_pass=own)
    assert options["clone_input"] is False
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    options["post_grad_custom_post_pass"](module, [], None)
    assert seen == ["own"]

"""Programs traced as the compilers of torch_npu see them, and graphs run with copies that are late.

On the CPU a start copies at once and a wait copies nothing, so that a wait in a wrong place shows
in no value. :class:`Adversary` runs a graph with the copies as late as they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch.fx import Graph, GraphModule, Interpreter, Node

import npu_kv_ops.ops  # noqa: F401 - registers the operators
from npu_kv_ops.graph_passes import transfers

Tensors = list[torch.Tensor]
Pass = Callable[[Graph], Any]
GARBAGE = 1e6


class Traced:
    """A function with its functional graph, in which the graph itself writes its inputs.

    Args:
        function: takes tensors and lists of tensors. Tensors that share a storage at the first call
            share it in the traces too; later calls need arguments laid out alike.
        graph_pass: changes the graph.
    """

    def __init__(self, function: Callable[..., Any], graph_pass: Pass | None = None) -> None:
        self._pass = graph_pass
        self._late = False
        self._call = aot_function(
            function, fw_compiler=self._compile, keep_inference_input_mutations=True
        )

    def __call__(self, *arguments: Any, late: bool = False) -> Any:
        """``late``: with an :class:`Adversary`."""
        self._late = late
        with torch.no_grad():
            return self._call(*arguments)

    def _compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        if self._pass is not None:
            self._pass(module.graph)
            module.graph.lint()
            module.recompile()
        adversary = Adversary(module)

        def run(*inputs: Any) -> Any:
            return adversary.run(*inputs) if self._late else module.forward(*inputs)

        return make_boxed_func(run)


def targets(graph: Graph, of: Iterable[str] = ()) -> list[str]:
    """The operators of a graph in order, by short names, without views; or just some of them."""
    wanted = set(of)
    found = [_short(node) for node in graph.nodes if node.op == "call_function"]
    views = {"as_strided", "slice", "select", "view", "getitem", "unbind", "alias"}
    return [name for name in found if (name in wanted if wanted else name not in views)]


def _short(node: Node) -> str:
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        return "functional"
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")
    return name.removeprefix("swap_blocks_").replace("batch", "swap")


class Adversary(Interpreter):
    """Runs a graph; each part is copied when it is waited for, with what its source holds then.

    Meanwhile its destination holds garbage. So a read of a destination that comes too early, a
    write of either side that does, and a missing wait show in the values.
    """

    def run_node(self, n: Node) -> Any:
        moved = transfers.transfer(n)
        if moved is None or moved.kind == transfers.SWAP or not moved.in_place:
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        if moved.kind == transfers.START:
            src, dst, *ids = args[:4]
            # The ids are read now: they may change later.
            columns = [torch.as_tensor(column).tolist() for column in ids]
            pairs = [pair for pair in zip(*columns, strict=True) if min(pair) >= 0]
            for tensor in dst:
                for _, block in pairs:
                    tensor[block] = GARBAGE
            parts = args[4] if len(args) > 4 else [len(src)]
            return (pairs, [None] * len(parts))
        (pairs, done), src, dst, part = args[0], args[1], args[2], (args[3] if len(args) > 3 else 0)
        for one, other in zip(src, dst, strict=True):
            for block, into in pairs:
                other[into] = one[block]
        done[part] = True
        return None


def leaves(values: Any) -> Tensors:
    """All tensors of nested lists, copied."""
    found = torch.utils._pytree.tree_leaves(values)
    return [one.clone() for one in found if isinstance(one, torch.Tensor)]

"""Reading functional FX graphs: the nodes that stand for in-place operators, and what aliases what.

A compiler sees ``op(src, dst, ...)``, which writes ``dst``, as a node that returns new values::

    n = auto_functionalized_v2(op, ..., _all_bases=[a, b])     a, b: whole tensors, not views
    a1 = getitem(n, 1); b1 = getitem(n, 2)                     a, b afterwards
    ...                                                        whatever reads them reads a1, b1
    copy_(b, b1)                                               b is an input: its new content
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

_HOP = torch.ops.higher_order.auto_functionalized_v2
_COPY = torch.ops.aten.copy_.default
_NAMESPACE = "npu_kv"


@dataclass(frozen=True)
class MemoryRange:
    """Bytes of one storage. An end of None: unknown, because a size is a symbol."""

    storage: int
    begin: int
    end: int | None

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether they may share a byte."""
        if self.storage != other.storage:
            return False
        return (self.end is None or other.begin < self.end) and (
            other.end is None or self.begin < other.end
        )


def memory_of(node: Node) -> MemoryRange | None:
    """The memory of a node's value; None when it is no tensor.

    Tensors that shared a storage before they were traced share it in their traces too.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    storage = value.untyped_storage()._cdata
    item = value.element_size()
    offset, steps = value.storage_offset(), list(zip(value.shape, value.stride(), strict=True))
    if not all(
        isinstance(number, int) for number in (offset, *(n for step in steps for n in step))
    ):
        return MemoryRange(storage, 0, None)
    begin = int(offset) * item
    elements = 0 if value.numel() == 0 else 1 + sum((size - 1) * step for size, step in steps)
    return MemoryRange(storage, begin, begin + int(elements) * item)


def share_a_storage(one: Node, other: Node) -> bool:
    """Whether two tensors lie in one storage."""
    first, second = memory_of(one), memory_of(other)
    return first is not None and second is not None and first.storage == second.storage


def may_overlap(one: Node, other: Node) -> bool:
    """Whether two values may share a byte; False when one of them is no tensor."""
    if one is other:
        return True
    if one.op == other.op == "placeholder":
        # AOTAutograd makes one input of inputs that overlap when one of them is written, and has
        # Dynamo guard that the others stay apart.
        return False
    first, second = memory_of(one), memory_of(other)
    return first is not None and second is not None and first.overlaps(second)


def operator_nodes(graph: Graph) -> list[Node]:
    """The nodes that stand for npu_kv operators, in order."""
    nodes = graph.find_nodes(op="call_function", target=_HOP)
    return [node for node in nodes if _operator(node).namespace == _NAMESPACE]


def name_of(node: Node) -> str:
    """``npu_kv.swap_blocks_batch.default`` and the node's own name."""
    return f"{_operator(node)} ({node.name})"


def bases(node: Node) -> list[Node]:
    """The whole tensors that the operator writes, or writes parts of."""
    return list(node.kwargs["_all_bases"])  # type: ignore[arg-type]


def results(call: Node) -> dict[int, list[Node]]:
    """The nodes that give a base as the operator leaves it, by the number of the base."""
    found: dict[int, list[Node]] = {}
    for user in call.users:
        if user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] > 0:
            found.setdefault(user.args[1] - 1, []).append(user)
    return found


def origin(base: Node) -> Node:
    """The tensor that a base was before the npu_kv operators of which it is a result."""
    while base.target is operator.getitem and isinstance(base.args[0], Node):
        call, number = base.args[0], base.args[1]
        if call.target is not _HOP or _operator(call).namespace != _NAMESPACE:
            break
        if not isinstance(number, int):
            break
        base = bases(call)[number - 1]
    return base


def puts(node: Node, value: Node, into: Node) -> bool:
    """Whether ``node`` is ``copy_(into, value)``."""
    return node.target is _COPY and node.args[0] is into and node.args[1] is value


def erase_self_copies(graph: Graph) -> None:
    """Removes the nodes ``copy_(x, x)``."""
    for node in graph.find_nodes(op="call_function", target=_COPY):
        target, source = node.args[:2]
        if target is source and isinstance(target, Node):
            node.replace_all_uses_with(target)
            graph.erase_node(node)


def _operator(node: Node) -> torch._ops.OpOverload:
    return node.args[0]  # type: ignore[return-value]

"""Reading functional FX graphs: the nodes that stand for in-place operators, and what aliases what.

A compiler sees ``op(src, dst, ...)``, which writes ``dst``, as a node that returns new values::

    n = auto_functionalized_v2(op, ..., _all_bases=[a, b])     a, b: whole tensors, not views
    a1 = getitem(n, 1); b1 = getitem(n, 2)                     a, b afterwards
    ...                                                        whatever reads them reads a1, b1
    copy_(b, b1)                                               b is an input: its new content

An operator that returns something itself has that at the front of what the node returns.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops import auto_functionalize
from torch.fx import Graph, Node

HOP = torch.ops.higher_order.auto_functionalized_v2
COPY = torch.ops.aten.copy_.default
NAMESPACE = "npu_kv"


def operator_nodes(graph: Graph) -> list[Node]:
    """The nodes that stand for npu_kv operators, in order."""
    nodes = graph.find_nodes(op="call_function", target=HOP)
    return [node for node in nodes if is_ours(node)]


def is_ours(node: Node) -> bool:
    """Whether it stands for an npu_kv operator."""
    op = node.args[0] if node.target is HOP else None
    return isinstance(op, torch._ops.OpOverload) and op.namespace == NAMESPACE


def operator_of(call: Node) -> torch._ops.OpOverload:
    """The operator that a node stands for."""
    return call.args[0]  # type: ignore[return-value]


def name_of(call: Node) -> str:
    """``npu_kv.swap_blocks_batch.default`` and the node's own name."""
    return f"{operator_of(call)} ({call.name})"


def bases(call: Node) -> list[Node]:
    """The whole tensors that the operator writes, or writes parts of."""
    return list(call.kwargs["_all_bases"])  # type: ignore[arg-type]


def own_results(call: Node) -> int:
    """How many results come before the bases."""
    return max(1, len(operator_of(call)._schema.returns))


def results(call: Node) -> dict[int, list[Node]]:
    """The nodes that give a base as the operator leaves it, by the number of the base."""
    first = own_results(call)
    found: dict[int, list[Node]] = {}
    for user in call.users:
        number = user.args[1] if user.target is operator.getitem else None
        if isinstance(number, int) and number >= first:
            found.setdefault(number - first, []).append(user)
    return found


def base_of_result(node: Node) -> Node | None:
    """The base that a node gives as an operator leaves it, or None when it is no such node."""
    if node.target is not operator.getitem:
        return None
    call, number = node.args
    if not isinstance(call, Node) or call.target is not HOP or not isinstance(number, int):
        return None
    if not isinstance(call.args[0], torch._ops.OpOverload):
        return None
    index = number - own_results(call)
    return bases(call)[index] if index >= 0 else None


def origin(base: Node) -> Node:
    """The tensor that a base was before the npu_kv operators of which it is a result."""
    before = base_of_result(base)
    while before is not None and is_ours(base.args[0]):  # type: ignore[arg-type]
        base, before = before, base_of_result(before)
    return base


def views(call: Node) -> dict[str, list[Any]]:
    """How the written lists of tensors are taken from the bases, by name.

    They are torch's own descriptions (``NotView``, ``AliasViewInfo``, ``SliceViewInfo``,
    ``AsStridedViewInfo``); their numbers may be nodes.
    """
    names, types = auto_functionalize.get_mutable_args(operator_of(call))
    found: dict[str, list[Any]] = auto_functionalize.read_view_information_from_args(
        names, types, dict(call.kwargs), []
    )
    if _slices_count_from_the_storage():
        for several in found.values():
            for view in several:
                if isinstance(view, auto_functionalize.SliceViewInfo):
                    _count_from_base(view, bases(call)[view.base_index].meta["val"])
    return found


def mend_slices(call: Node) -> bool:
    """Describes slices of bases that do not begin at their storage in a way that torch gets right.

    torch 2.13 notes as the start of a slice what lies before it in the storage, and then takes it
    from the base: other blocks, if the base begins further on.

    Returns:
        whether there were any.
    """
    kwargs = dict(call.kwargs)
    for name, several in views(call).items():
        for position, view in enumerate(several):
            base = bases(call)[view.base_index].meta["val"]
            key = f"_{name}_{position}"
            if f"{key}_slice_start" not in kwargs or kwargs[f"{key}_slice_start"] == view.start:
                continue
            if not all(isinstance(number, int) for number in (*base.shape, *base.stride())):
                continue  # torch's own mistake stays, unless the call is put in place
            for part in ("dim", "start", "end"):
                del kwargs[f"{key}_slice_{part}"]
            size = list(base.shape)
            size[view.dim] = view.end - view.start
            kwargs[f"{key}_size"], kwargs[f"{key}_stride"] = tuple(size), tuple(base.stride())
            offset = base.storage_offset() + view.start * base.stride(view.dim)
            kwargs[f"{key}_storage_offset"] = offset
    mended = kwargs.keys() != call.kwargs.keys()
    if mended:
        call.kwargs = kwargs
    return mended


@functools.cache
def _slices_count_from_the_storage() -> bool:
    whole = torch.empty(3, 1, device="meta")
    found: Any = auto_functionalize.try_use_slice(whole[1:], whole[2:])  # type: ignore[no-untyped-call]
    return found is not None and int(found[1]) == 2


def _count_from_base(view: Any, base: torch.Tensor) -> None:
    offset, stride = base.storage_offset(), base.stride(view.dim)
    if all(isinstance(number, int) for number in (offset, stride, view.start, view.end)) and stride:
        view.start -= offset // stride
        view.end -= offset // stride


def erase_self_copies(graph: Graph) -> None:
    """Removes the nodes ``copy_(x, x)``."""
    for node in graph.find_nodes(op="call_function", target=COPY):
        target, source = node.args[:2]
        if target is source and isinstance(target, Node):
            node.replace_all_uses_with(target)
            graph.erase_node(node)


@contextlib.contextmanager
def traced_like(value: torch.Tensor) -> Iterator[None]:
    """Where values are made as ``value`` was traced: without new guards and new symbols."""
    mode = getattr(value, "fake_mode", None)
    symbols = getattr(mode, "shape_env", None)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        if symbols is not None:
            stack.enter_context(symbols.suppress_guards())
            stack.enter_context(symbols.ignore_fresh_unbacked_symbols())
        yield

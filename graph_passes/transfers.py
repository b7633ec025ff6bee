"""Reading the nodes of npu_kv operators: which blocks go from where to where."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from . import functional_graph as functional

SWAP, START, WAIT = "swap", "start", "wait"

_PACKETS = {
    "npu_kv::swap_blocks_batch": SWAP,
    "npu_kv::swap_blocks_start": START,
    "npu_kv::swap_blocks_wait": WAIT,
}

Ids = Node | tuple[Any, ...]  # constants are int, or nodes of symbols


class Operand(NamedTuple):
    """A tensor of a transfer: a node, or a view of one that only a functional node describes."""

    node: Node
    view: Any = None


@dataclass(frozen=True)
class Transfer:
    """A node of an npu_kv operator, in place or functional.

    Args:
        node: the node.
        kind: ``SWAP``, ``START`` or ``WAIT``.
        op: the operator.
        src: the tensors that are read. Of a wait: those of its part.
        dst: the tensors that are written.
        ids: the blocks that are read and those that are written; none of a wait.
        parts: tensors of each part of a start.
        ticket: of a wait, what its start returned.
        part: of a wait.
    """

    node: Node
    kind: str
    op: torch._ops.OpOverload
    src: tuple[Operand, ...]
    dst: tuple[Operand, ...]
    ids: tuple[Ids, ...] = ()
    parts: tuple[int, ...] = ()
    ticket: Node | None = None
    part: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the node is the operator itself."""
        return self.node.target is self.op

    @property
    def id_nodes(self) -> list[Node]:
        """The tensors of ids; none when they are constants."""
        return [ids for ids in self.ids if isinstance(ids, Node)]

    @property
    def copies_nothing(self) -> bool:
        """Whether its constant ids name no pair of blocks."""
        constants = [ids for ids in self.ids if not isinstance(ids, Node)]
        if self.kind == WAIT or len(constants) < len(self.ids):
            return False
        if not all(isinstance(block, int) for ids in constants for block in ids):
            return False
        return all(min(pair) < 0 for pair in zip(*constants, strict=False))

    @functools.cached_property
    def slices(self) -> list[slice]:
        """The tensors of each part of a start."""
        ends = list(itertools.accumulate(self.parts))
        return [slice(end - count, end) for count, end in zip(self.parts, ends, strict=True)]


def kind_of(op: object) -> str | None:
    """``SWAP``, ``START`` or ``WAIT``; None for any other operator, ``.ptrs`` among them."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != functional.NAMESPACE:
        return None
    return None if op._overloadname == "ptrs" else _PACKETS.get(op._schema.name)


def transfer(node: Node) -> Transfer | None:
    """What a node does; None when it is not of an npu_kv operator that moves blocks."""
    if node.op != "call_function":
        return None
    if node.target is functional.HOP:
        op = functional.operator_of(node)
        kind = kind_of(op)
        return None if kind is None else _functional_transfer(node, kind, op)
    op = node.target  # type: ignore[assignment]
    kind = kind_of(op)
    if kind is None:
        return None
    arguments = _arguments(op, node.args, node.kwargs)
    src, dst = (tuple(map(Operand, arguments[name])) for name in ("src", "dst"))
    return _transfer(node, kind, op, src, dst, arguments)


def _functional_transfer(node: Node, kind: str, op: torch._ops.OpOverload) -> Transfer:
    bases = functional.bases(node)
    views = functional.views(node)
    src, dst = (
        tuple(Operand(bases[view.base_index], view) for view in views[name])
        for name in ("src", "dst")
    )
    return _transfer(node, kind, op, src, dst, _arguments(op, (), node.kwargs))


def _transfer(
    node: Node,
    kind: str,
    op: torch._ops.OpOverload,
    src: tuple[Operand, ...],
    dst: tuple[Operand, ...],
    arguments: dict[str, Any],
) -> Transfer:
    if kind == WAIT:
        return Transfer(
            node, kind, op, src, dst, ticket=arguments["ticket"], part=arguments["part"]
        )
    ids = tuple(
        ids if isinstance(ids, Node) else tuple(ids)
        for ids in (arguments["src_blocks"], arguments["dst_blocks"])
    )
    parts = arguments.get("parts")
    return Transfer(node, kind, op, src, dst, ids, (len(src),) if parts is None else tuple(parts))


def _arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found

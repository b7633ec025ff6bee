"""Which bytes each node of a graph reads and writes, once the compiler has run it in place."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from . import functional_graph as functional
from . import transfers
from .ranges import MemoryRange, RangeMap, extent, range_of, storage_of
from .transfers import Operand, Transfer

_aten = torch.ops.aten
_SIZES_ONLY = {
    _aten.sym_size.int,
    _aten.sym_stride.int,
    _aten.sym_numel.default,
    _aten.sym_storage_offset.default,
}
_SIZES_ONLY |= {
    overload
    for name in (
        *(
            f"{what}_like"
            for what in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
        ),
        *(f"new_{what}" for what in ("empty", "empty_strided", "full", "ones", "zeros")),
    )
    for packet in (getattr(_aten, name),)
    for overload in (getattr(packet, each) for each in packet.overloads())
    if not overload._schema.is_mutable
}
# Their operators touch no memory but that of their arguments and results. Others may: an attention
# that finds its KV cache by the name of the layer.
_OPEN = {"aten", "prims", "inductor_prims", "_c10d_functional", "c10d_functional", "npu"}
_declared: set[torch._ops.OpOverload] = set()

# What an operator is to memory.
_TOUCHES_NOTHING, _OURS, _FUNCTIONAL, _IN_PLACE, _PURE, _PLAIN, _UNKNOWN = range(7)


def touches_only_its_arguments(*operators: Any) -> None:
    """Declare operators of your own that touch no tensor but their arguments and results.

    Nothing is moved over an operator of which that is not known. Those of torch and of torch_npu
    (``aten``, ``prims``, ``npu``) need no declaration. For the process; safe from several threads.

    Args:
        operators: ``torch.ops.namespace.name``, or one overload of it.

    Raises:
        TypeError: something else.
    """
    for one in operators:
        if isinstance(one, torch._ops.OpOverloadPacket):
            _declared.update(getattr(one, name) for name in one.overloads())  # type: ignore[no-untyped-call]
        elif isinstance(one, torch._ops.OpOverload):
            _declared.add(one)
        else:
            raise TypeError(f"{one!r} is no operator; torch.ops.namespace.name is one")


def declared() -> list[str]:
    """The names of the operators that :func:`touches_only_its_arguments` was told of."""
    return sorted(map(str, _declared))


def _is_open(op: object) -> bool:
    return isinstance(op, torch._ops.OpOverload) and (op.namespace in _OPEN or op in _declared)


class Access(NamedTuple):
    """A range that a node reads, or writes (and perhaps reads)."""

    memory: MemoryRange
    writes: bool


class GraphMemory:
    """Who touches the memory that the transfers of a graph touch, by position and by bytes.

    What counts is memory as it will be once the compiler has put back in place what it can:

    - A view touches nothing. Whatever else takes a tensor reads it, the output included.
    - An in-place operator writes what its schema says.
    - Results of functional nodes that stand for in-place operators lie where their bases lie, and
      such a node writes its bases.
    - ``v`` of ``copy_(pool, v)`` lies in ``pool`` when it comes from there through first arguments
      of the same shape, as in ``v = index_put(pool, ...)``; what makes it writes ``pool``.
    - A swap reads its sources and ids and writes its destinations. A start does the same, and so
      does a wait for its part: what must not happen while blocks are under way conflicts with both.
    - A barrier is a node that may do more than that: nothing is moved over it.

    Positions are numbers that grow along the graph; ``end`` is that of its output. Accesses to
    memory that no transfer touches are not kept. Built once, in time linear in the graph; nodes
    may be moved afterwards (:meth:`move`). A query takes time logarithmic in the accesses of each
    range that overlaps. Not to be shared by threads.
    """

    def __init__(self, graph: Graph) -> None:
        self.positions: dict[Node, float] = {}
        self.transfers: dict[Node, Transfer] = {}
        self._at: dict[float, Node] = {}
        self._storages: dict[Node, tuple[int, ...] | None] = {}
        self._ranges: dict[Node, tuple[MemoryRange, ...]] = {}
        self._makers: dict[int, Node] = {}
        self._homes: dict[int, tuple[MemoryRange, int | None]] = {}
        self._classes: dict[int, int] = {}
        self._accesses: dict[Node, Sequence[Access]] = {}
        self._lines: RangeMap[_Line] = RangeMap(_Line)
        self._barriers: list[float] = []
        self._barrier_nodes: set[Node] = set()
        for number, node in enumerate(graph.nodes):
            position = float(number)
            self.positions[node] = position
            self._at[position] = node
            self._storages[node] = storages = _storages(node)
            for storage in storages or ():
                self._makers.setdefault(storage, node)
            if node.op == "call_function":
                moved = transfers.transfer(node)
                if moved is not None:
                    self.transfers[node] = moved
        self.end = float(len(self.positions) - 1)
        self._find_homes(graph)
        self._touched = self._touched_by_transfers()
        for node in graph.nodes:
            self._note(node)

    def memory(self, node: Node) -> MemoryRange | None:
        """The bytes of a node's tensor; None when it is no tensor, or nobody knows."""
        one = self._raw(node)
        return None if one is None else self._home(one)

    def memory_of(self, operand: Operand) -> MemoryRange | None:
        """The bytes of a tensor of a transfer."""
        one = self._raw(operand.node)
        if one is None:
            return None
        if operand.view is not None:
            one = _of_view(operand.node.meta["val"], operand.view, one)
        return self._home(one)

    def accesses(self, node: Node) -> Sequence[Access]:
        """What a node reads and writes of the memory that transfers touch."""
        return self._accesses.get(node, ())

    def is_barrier(self, node: Node) -> bool:
        """Whether a node may do what nobody knows."""
        return node in self._barrier_nodes

    def node_at(self, position: float) -> Node:
        """The node at a position."""
        return self._at[position]

    def barrier_before(self, position: float) -> float | None:
        """The position of the last barrier before a position."""
        place = bisect.bisect_left(self._barriers, position)
        return self._barriers[place - 1] if place else None

    def barrier_after(self, position: float) -> float | None:
        """The position of the first barrier behind a position."""
        place = bisect.bisect_right(self._barriers, position)
        return self._barriers[place] if place < len(self._barriers) else None

    def conflict_before(self, accesses: Iterable[Access], position: float) -> float | None:
        """The position of the last node before ``position`` that must stay before it."""
        found: float | None = None
        for line in self._conflicting(accesses):
            place = bisect.bisect_left(line, position)
            if place and (found is None or line[place - 1] > found):
                found = line[place - 1]
        return found

    def conflict_after(self, accesses: Iterable[Access], position: float) -> float | None:
        """The position of the first node behind ``position`` that must stay behind it."""
        found: float | None = None
        for line in self._conflicting(accesses):
            place = bisect.bisect_right(line, position)
            if place < len(line) and (found is None or line[place] < found):
                found = line[place]
        return found

    def views_to_move(self, node: Node, position: float) -> list[Node] | None:
        """The views that have to move with ``node`` for it to stand at ``position``, in order.

        None: it cannot, since something that it takes does not exist there and is no view.
        """
        found: dict[Node, None] = {}
        if all(self._exists(read, position, found) for read in node.all_input_nodes):
            return list(found)
        return None

    def move(self, node: Node, position: float) -> None:
        """Notes that a node stands elsewhere now, or is part of the one at that position."""
        before = self.positions[node]
        for access in self._accesses.get(node, ()):
            self._lines[access.memory].remove(access, before)
        self.positions[node] = position
        self._at.setdefault(position, node)
        for access in self._accesses.get(node, ()):
            self._lines[access.memory].add(access, position)

    def replace(self, node: Node, other: Node) -> None:
        """Notes that another node does what ``node`` did, at its place."""
        position = self.positions[other] = self.positions.pop(node)
        self._at[position] = other
        self._storages[other] = ()
        self.transfers[other] = self.transfers[node]
        self._accesses[other] = self._accesses.pop(node, ())

    def is_view(self, node: Node) -> bool:
        """Whether a node only names bytes of one of its inputs, and may be moved up to it."""
        if node.op != "call_function" or self._class_of(node.target) not in (
            _TOUCHES_NOTHING,
            _PURE,
        ):
            return False
        return self._names_input(node)

    def takes_time(self, node: Node) -> bool:
        """Whether a node computes or moves something, as far as is known."""
        if node in self._barrier_nodes or node in self.transfers:
            return True
        if node.op != "call_function" or node not in self._storages or self.is_view(node):
            return False
        if node.target is functional.COPY:
            where = [self.memory(one) for one in node.all_input_nodes]
            if len(where) == 2 and where[0] == where[1]:
                return False  # it is made there
        kind = self._class_of(node.target)
        if kind in (_TOUCHES_NOTHING, _PLAIN):
            return node.target is not operator.getitem and bool(self._storages[node])
        return True

    def _exists(self, node: Node, position: float, moved: dict[Node, None]) -> bool:
        if self.positions[node] < position or node in moved:
            return True
        if not self.is_view(node):
            return False
        if not all(self._exists(read, position, moved) for read in node.all_input_nodes):
            return False
        moved[node] = None
        return True

    def _raw(self, node: Node) -> MemoryRange | None:
        """The bytes of a node's tensor as traced."""
        storages = self._storages.get(node)
        return self._raw_all(node)[0] if storages is not None and len(storages) == 1 else None

    def _raw_all(self, node: Node) -> tuple[MemoryRange, ...]:
        found = self._ranges.get(node)
        if found is None:
            value = node.meta["val"]
            parts = [value] if isinstance(value, torch.Tensor) else value
            ranges = (range_of(one) for one in parts if isinstance(one, torch.Tensor))
            found = self._ranges[node] = tuple(one for one in ranges if one is not None)
        return found

    def _home(self, memory: MemoryRange) -> MemoryRange:
        while (home := self._homes.get(memory.storage)) is not None:
            where, shift = home
            if shift is None:
                memory = where
            else:
                end = None if memory.end is None else memory.end + shift
                memory = memory._replace(storage=where.storage, begin=memory.begin + shift, end=end)
        return memory

    def _find_homes(self, graph: Graph) -> None:
        for call in graph.find_nodes(op="call_function", target=functional.HOP):
            for user in call.users:
                base = functional.base_of_result(user)
                if base is not None:
                    self._lies_in(user, base)
        for copy in graph.find_nodes(op="call_function", target=functional.COPY):
            pool, value = copy.args[:2]
            if isinstance(pool, Node) and isinstance(value, Node) and pool.op != "call_function":
                for node in self._chain(value, pool):
                    self._lies_in(node, pool)

    def _lies_in(self, node: Node, base: Node) -> None:
        inner, outer = self._raw(node), self._raw(base)
        if inner is None or outer is None:
            return
        home = self._home(outer)
        if self._home(inner).storage == home.storage:
            return
        shift = home.begin - inner.begin if _same_layout(node, base) else None
        self._homes[inner.storage] = (home, shift)

    def _chain(self, value: Node, pool: Node) -> list[Node]:
        """What is made of ``pool`` on the way to ``value``; nothing when it is made elsewhere."""
        made: list[Node] = []
        where = self.memory(pool)
        while where is not None:
            memory = self.memory(value)
            if memory is None:
                return []
            if memory.storage == where.storage:
                return made
            maker = self._makers[memory.storage]
            first = maker.args[0] if maker.args and maker.op == "call_function" else None
            if not isinstance(maker.target, torch._ops.OpOverload) or not isinstance(first, Node):
                return []
            if maker.target in _SIZES_ONLY:
                return []
            if not _same_size(maker, first):
                return []
            made.append(maker)
            value = first
        return []

    def _touched_by_transfers(self) -> set[int]:
        """The storages that transfers touch, by all their names."""
        touched = {
            memory.storage
            for moved in self.transfers.values()
            for operand in (*moved.src, *moved.dst, *map(Operand, moved.id_nodes))
            if (memory := self.memory_of(operand)) is not None
        }
        return touched | {
            storage
            for storage, (home, _) in self._homes.items()
            if self._home(home).storage in touched
        }

    def _note(self, node: Node) -> None:
        accesses = self._accesses_of(node)
        position = self.positions[node]
        if accesses is None or self._works_on_clones(node):
            self._barriers.append(position)
            self._barrier_nodes.add(node)
        if accesses is None:
            known = [one for one in node.all_input_nodes if self._storages.get(one) is not None]
            accesses = self._inputs(known, writes=True)
        if accesses:
            self._accesses[node] = accesses
            for access in accesses:
                self._lines[access.memory].add(access, position)

    def _works_on_clones(self, node: Node) -> bool:
        moved = self.transfers.get(node) if node.target is functional.HOP else None
        return moved is not None and moved.kind != transfers.SWAP

    def _accesses_of(self, node: Node) -> Sequence[Access] | None:
        """None: a barrier."""
        if node.op in ("placeholder", "get_attr"):
            return ()
        if node.op == "output":
            return self._inputs(node.all_input_nodes)
        kind = self._class_of(node.target) if node.op == "call_function" else _UNKNOWN
        if kind == _TOUCHES_NOTHING:
            return ()
        moved = self.transfers.get(node)
        if moved is not None and (kind == _OURS or moved.kind != transfers.SWAP):
            return self._of_transfer(moved)
        inputs = node.all_input_nodes
        storages = self._storages
        read = False
        for one in inputs:
            found = storages[one]
            if found is None:
                return None
            read = read or not self._touched.isdisjoint(found)
        if kind == _FUNCTIONAL:
            op = node.args[0]
            ours = isinstance(op, torch._ops.OpOverload) and transfers.kind_of(op) is not None
            if not (ours or _is_open(op)):
                return None
            return self._of_functional(node) if read else ()
        if kind == _IN_PLACE:
            written = _written(node)
            return [*self._inputs(inputs), *self._inputs(written, writes=True)] if read else ()
        if kind == _UNKNOWN:
            return None
        if kind == _PLAIN:
            tensors = storages[node] or any(storages[one] for one in inputs)
            return None if tensors or storages[node] is None else ()
        own = storages[node] or ()
        if not read or (own and self._names_input(node)):
            return ()
        home = (
            [
                Access(self._home(memory), True)
                for memory in self._raw_all(node)
                if memory.storage in self._homes
            ]
            if not self._homes.keys().isdisjoint(own)
            else []
        )
        return [*self._inputs(inputs), *home]

    def _class_of(self, target: Any) -> int:
        found = self._classes.get(id(target))
        if found is None:
            found = self._classes[id(target)] = _class_of(target)
        return found

    def _of_transfer(self, moved: Transfer) -> Sequence[Access] | None:
        found: list[Access] = []
        for operands, writes in ((moved.src, False), (moved.dst, True)):
            for operand in operands:
                memory = self.memory_of(operand)
                if memory is None:
                    return None
                found.append(Access(memory, writes))
        if any(self._storages.get(one) is None for one in moved.id_nodes):
            return None
        return [*found, *self._inputs(moved.id_nodes)]

    def _of_functional(self, node: Node) -> Sequence[Access]:
        bases = functional.bases(node)
        others = [one for one in node.all_input_nodes if one not in set(bases)]
        return [*self._inputs(bases, writes=True), *self._inputs(others)]

    def _inputs(self, nodes: Iterable[Node], writes: bool = False) -> list[Access]:
        return [
            Access(self._home(memory), writes)
            for node in nodes
            if not self._touched.isdisjoint(self._storages[node] or ())
            for memory in self._raw_all(node)
        ]

    def _names_input(self, node: Node) -> bool:
        own = self._storages[node]
        if not own:
            return False
        inputs = [self._storages[read] or () for read in node.all_input_nodes]
        return all(any(storage in other for other in inputs) for storage in own)

    def _conflicting(self, accesses: Iterable[Access]) -> Iterator[list[float]]:
        """Positions of accesses that conflict, in order, range by range."""
        for access in accesses:
            for line in self._lines.overlapping(access.memory):
                if line.writes:
                    yield line.writes
                if access.writes and line.reads:
                    yield line.reads


class _Line:
    """The positions of the accesses to one range, in order."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: list[float] = []
        self.writes: list[float] = []

    def add(self, access: Access, position: float) -> None:
        positions = self.writes if access.writes else self.reads
        place = bisect.bisect_left(positions, position)
        if place == len(positions) or positions[place] != position:
            positions.insert(place, position)

    def remove(self, access: Access, position: float) -> None:
        positions = self.writes if access.writes else self.reads
        place = bisect.bisect_left(positions, position)
        if place < len(positions) and positions[place] == position:
            del positions[place]


def _class_of(target: Any) -> int:
    if target is operator.getitem or target in _SIZES_ONLY:
        return _TOUCHES_NOTHING
    if target is functional.HOP:
        return _FUNCTIONAL
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _UNKNOWN
    if not isinstance(target, torch._ops.OpOverload):
        return _PLAIN  # sums of symbols and the like
    if transfers.kind_of(target) is not None:
        return _OURS
    if not _is_open(target):
        return _UNKNOWN
    return _IN_PLACE if target._schema.is_mutable else _PURE


def _storages(node: Node) -> tuple[int, ...] | None:
    """The storages of all tensors of a value; None when nobody knows."""
    value = node.meta.get("val", _storages)
    if isinstance(value, torch.Tensor):
        storage = storage_of(value)
        return None if storage is None else (storage,)
    if isinstance(value, (list, tuple)):
        found = [storage_of(part) for part in value if isinstance(part, torch.Tensor)]
        return None if None in found else tuple(found)  # type: ignore[arg-type]
    # A module or a graph that a higher-order operator takes has no value, nor has the output.
    unknown = value is _storages and node.op not in ("get_attr", "output")
    return None if unknown else ()


def _of_view(base: torch.Tensor, view: Any, whole: MemoryRange) -> MemoryRange:
    """The bytes of a view that a functional node describes."""
    item = base.element_size()
    if hasattr(view, "storage_offset"):
        return extent(whole.storage, item, view.storage_offset, view.size, view.stride)
    if hasattr(view, "dim"):
        start, end, stride = view.start, view.end, base.stride(view.dim)
        if isinstance(start, int) and isinstance(end, int) and isinstance(stride, int):
            sizes = list(base.shape)
            sizes[view.dim] = end - start
            offset = base.storage_offset() + start * stride
            return extent(whole.storage, item, offset, sizes, base.stride())
    return whole


def _written(node: Node) -> list[Node]:
    """The tensors that an in-place operator writes."""
    found: list[Node] = []
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        several = given if isinstance(given, (list, tuple)) else [given]
        found += [one for one in several if isinstance(one, Node)]
    return found


def _same_layout(node: Node, other: Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return (
        _same_size(node, other)
        and _equal(one.stride(), two.stride())
        and isinstance(one.storage_offset(), int)
        and isinstance(two.storage_offset(), int)
    )


def _same_size(node: Node, other: Node) -> bool:
    one, two = node.meta.get("val"), other.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.dtype == two.dtype and _equal(one.shape, two.shape)


def _equal(numbers: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same numbers or the same symbols; asks nothing of the symbols."""
    return len(numbers) == len(others) and all(
        one == other if isinstance(one, int) and isinstance(other, int) else str(one) == str(other)
        for one, other in zip(numbers, others, strict=True)
    )

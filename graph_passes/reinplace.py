"""No clone of a pool survives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from . import functional_graph as functional
from . import transfers
from .ranges import MemoryRange, range_of, storage_of

_log = logging.getLogger(__name__)
_aten = torch.ops.aten


class Reinplace:
    """Puts the operators back to work in place.

    A compiler gets a graph in which nothing is written, and may clone what it finds hard to write
    in place: all tensors of a call but one when several lie in one storage (layers that are views
    of one allocation), every tensor when it does not look (``aot_eager``). ::

        n = auto_functionalized_v2(swap_blocks_batch, src_blocks=s, ..., _all_bases=[a, b])
        a1 = getitem(n, 1); b1 = getitem(n, 2)
        y = add(b1, 1)
        copy_(a, a1); copy_(b, b1)

    becomes ::

        swap_blocks_batch([a], [b], s, d)
        y = add(b, 1)

    and likewise for ``swap_blocks_start``, whose ticket becomes the node itself, and
    ``swap_blocks_wait``. A tensor that is a view of a base becomes a view again, once for all
    calls.

    That is right when nobody reads an old ``a`` or ``b`` behind the call, and when they are not
    parts of one another. Otherwise the call is left to the compiler, which clones, and the reason
    is logged (INFO).

    To run behind the compiler's removal of clones: what is a copy of ``b`` before it may be ``b``
    itself afterwards.
    """

    name = "reinplace"

    def __call__(self, graph: Graph) -> int:
        """Changes ``graph``; returns how many calls it has put in place or mended."""
        calls = functional.operator_nodes(graph)
        mended = sum([functional.mend_slices(call) for call in calls])
        # All are judged before any is changed: afterwards the traced values of views no longer tell
        # what they are views of. The last first, because a call may hand its result to a later one.
        judge = _Judge(graph, calls)
        in_place: list[Node] = []
        for call in reversed(calls):
            reason = judge.reason_against(call)
            if reason is None:
                judge.accept(call)
                in_place.append(call)
            else:
                _log.info("%s stays functional: %s", functional.name_of(call), reason)
        if in_place:
            with functional.traced_like(functional.bases(in_place[0])[0].meta["val"]):
                lowering = _Lowering(graph)
                for call in reversed(in_place):
                    lowering.put_in_place(call)
                lowering.finish()
        return len(in_place) + mended


class _Judge:
    """Says which calls can work in place."""

    def __init__(self, graph: Graph, calls: list[Node]) -> None:
        self._memory: dict[Node, MemoryRange | None] = {}
        self._positions: dict[Node, int] = {}
        self._accepted: dict[Node, list[tuple[Node, int]]] = {}
        watched = [
            node
            for call in calls
            for nodes in (functional.bases(call), *functional.results(call).values())
            for node in nodes
        ]
        storages = {memory.storage for node in watched if (memory := self.memory(node)) is not None}
        self._reads: dict[int, list[tuple[int, Node, Node]]] = {}
        for position, node in enumerate(graph.nodes):
            self._positions[node] = position
            for read in node.all_input_nodes:
                memory = self.memory(read)
                if memory is not None and memory.storage in storages:
                    self._reads.setdefault(memory.storage, []).append((position, node, read))

    def memory(self, node: Node) -> MemoryRange | None:
        """The bytes of a traced value, as traced."""
        if node not in self._memory:
            value = node.meta.get("val")
            self._memory[node] = range_of(value) if isinstance(value, torch.Tensor) else None
        return self._memory[node]

    def reason_against(self, call: Node) -> str | None:
        """Why a call cannot work in place, or None."""
        if transfers.transfer(call) is None:
            return "it is no operator that these passes know"
        bases = functional.bases(call)
        if not bases:
            return "it writes nothing"
        origins: dict[int, list[tuple[Node, Node]]] = {}
        for base in bases:
            for one in {base, functional.origin(base)}:
                memory = self.memory(one)
                if memory is None:
                    return f"the memory of {base.name} is unknown"
                neighbours = origins.setdefault(memory.storage, [])
                for other, base_of_other in neighbours:
                    if base_of_other is not base and self._may_overlap(one, other):
                        return f"{base_of_other.name} and {base.name} may overlap"
                neighbours.append((one, base))
        for index, base in enumerate(bases):
            reader = self._reader_of_old(call, base, self._contents(call, index))
            if reader is not None:
                return f"{reader[0].name} reads what {reader[1].name} was before it"
        return None

    def accept(self, call: Node) -> None:
        """Notes that a call will work in place."""
        for index, base in enumerate(functional.bases(call)):
            self._accepted.setdefault(base, []).append((call, index))

    def _reader_of_old(
        self, call: Node, base: Node, contents: set[Node]
    ) -> tuple[Node, Node] | None:
        """Who reads what would be gone, and what it reads."""
        overwritten: int | None = None
        for where, node, read in self._reads_behind(self._positions[call], base):
            if not self._may_overlap(read, base):
                continue
            if read is not base or node.target is not functional.COPY or node.args[0] is not base:
                return node, read
            if node.args[1] not in contents:
                overwritten = where
        if overwritten is None:
            return None
        # The result would lie in the base, which holds something else from there on.
        for result in contents:
            for _, node, read in self._reads_behind(overwritten - 1, result):
                return node, read
        return None

    def _reads_behind(self, position: int, value: Node) -> Iterator[tuple[int, Node, Node]]:
        """The reads of what shares a storage with ``value``, behind a position, the last first."""
        memory = self.memory(value)
        for one in reversed(self._reads.get(memory.storage, ()) if memory is not None else ()):
            if one[0] <= position:
                break
            yield one

    def _contents(self, call: Node, index: int) -> set[Node]:
        """What base ``index`` holds after the call, and after later calls that are in place too."""
        found: set[Node] = set()
        more = [(call, index)]
        while more:
            one, number = more.pop()
            for result in functional.results(one).get(number, ()):
                found.add(result)
                more += self._accepted.get(result, ())
        return found

    def _may_overlap(self, one: Node, other: Node) -> bool:
        if one is other:
            return True
        if one.op == other.op == "placeholder":
            # AOTAutograd makes one input of inputs that overlap when one of them is written, and
            # has Dynamo guard that the others stay apart.
            return False
        first, second = self.memory(one), self.memory(other)
        return first is not None and second is not None and first.overlaps(second)


class _Lowering:
    """Replaces functional nodes by operators in place."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._views: dict[Any, Node] = {}
        # Storages of results that are gone, and the nodes that they lie in now.
        self._moved: dict[int, Node] = {}

    def put_in_place(self, call: Node) -> None:
        """Replaces one call. The calls before it must have been replaced before."""
        op, bases = functional.operator_of(call), functional.bases(call)
        written = {
            name: [self._view(call, bases[view.base_index], view) for view in views]
            for name, views in functional.views(call).items()
        }
        arguments = [
            written.get(argument.name, call.kwargs.get(argument.name))
            for argument in op._schema.arguments
        ]
        while arguments[-1] is None:
            arguments.pop()  # a default
        with self._graph.inserting_before(call):
            node = self._graph.call_function(op, tuple(arguments))
        value = call.meta.get("val")
        node.meta = {**call.meta, "val": value[0] if isinstance(value, tuple) else None}
        for index, replaced in functional.results(call).items():
            for result in replaced:
                self._replace(result, bases[index])
        for own in list(call.users):
            own.replace_all_uses_with(node)  # the ticket
            self._graph.erase_node(own)
        self._graph.erase_node(call)

    def finish(self) -> None:
        """Removes copies of a tensor to itself, and makes the traced values tell the truth again.

        A view of a result is a view of the base now, so that its traced value must share the
        storage of the base's.
        """
        functional.erase_self_copies(self._graph)
        for node in self._graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and self._is_stale(value):
                node.meta["val"] = tree_map_only(torch.Tensor, self._moved_value, value)

    def _replace(self, result: Node, base: Node) -> None:
        value = result.meta.get("val")
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            self._moved[storage] = base
        result.replace_all_uses_with(base)
        self._graph.erase_node(result)

    def _is_stale(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return storage_of(value) in self._moved
        return isinstance(value, (list, tuple)) and any(map(self._is_stale, value))

    def _moved_value(self, value: torch.Tensor) -> torch.Tensor:
        node = self._moved.get(storage_of(value) or 0)
        if node is None:
            return value
        base: torch.Tensor = node.meta["val"]
        if base.dtype != value.dtype:
            base = base.view(value.dtype)
        return torch.as_strided(base, value.shape, value.stride(), value.storage_offset())

    def _view(self, call: Node, base: Node, view: Any) -> Node:
        if hasattr(view, "storage_offset"):
            args: tuple[Any, ...] = (tuple(view.size), tuple(view.stride), view.storage_offset)
            target = _aten.as_strided.default
        elif hasattr(view, "dim"):
            args = (view.dim, view.start, view.end)
            target = _aten.slice.Tensor
        else:
            return base  # the whole of it
        key = (base, target, args)
        found = self._views.get(key)
        if found is None:
            with self._graph.inserting_before(call):
                found = self._graph.call_function(target, (base, *args))
            numbers = tree_map_only(Node, lambda node: node.meta["val"], args)
            found.meta = {**call.meta, "val": target(base.meta["val"], *numbers)}
            self._views[key] = found
        return found

"""Every read and write of a pool is in order with the transfers."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from . import functional_graph as functional
from . import transfers
from .memory import Access, GraphMemory
from .ranges import MemoryRange, RangeMap
from .transfers import Transfer

_HALVES = (transfers.START, transfers.WAIT)


class GraphOrderError(RuntimeError):
    """A graph whose transfers are not in order with what else touches their memory."""


class Move(NamedTuple):
    """The transfer of one pair of tensors, found again when it is merged or split.

    ``occurrence`` counts equal ones in the order of the graph.
    """

    src: MemoryRange | None
    dst: MemoryRange | None
    ids: tuple[Any, ...]
    occurrence: int


class Issue(NamedTuple):
    """The moment at which a transfer reads its ids: they may change while it is under way."""

    move: Move


Actor = Move | Issue | str  # the name of a node


class Edge(NamedTuple):
    """``before`` must have ended when ``behind`` begins."""

    before: Actor
    behind: Actor


class Span(NamedTuple):
    """The nodes with which something begins and ends; one and the same, unless it is split."""

    begin: Node
    end: Node


@dataclass
class _State:
    """What has touched a range so far: the last that wrote it, and who has read it since."""

    writer: Actor | None = None
    readers: list[Actor] = field(default_factory=list)


@dataclass(frozen=True)
class Dependences:
    """What must stay in order in a graph, by names that survive copies of it and these passes.

    Args:
        edges: of all memory that transfers touch. Each access has one to the last write before it
            of what it overlaps, and each write to the reads since; the others follow.
        writers: the names of the nodes that write such memory.
        moves: all transfers.
    """

    edges: tuple[Edge, ...]
    writers: frozenset[str]
    moves: frozenset[Move] = frozenset()

    @staticmethod
    def of(graph: Graph) -> Dependences:
        """Reads them from a graph. Time and number grow linearly with the accesses."""
        memory = GraphMemory(graph)
        states = RangeMap(_State)
        edges: dict[Edge, None] = {}
        writers: set[str] = set()
        moves = _moves(memory)
        steps = list(_in_order(memory, moves))
        for _, access in steps:
            states[access.memory]  # all of them first: what is added later has to be sorted anew
        for actor, access in steps:
            for edge in _edges(actor, access, states):
                edges[edge] = None
            if access.writes and isinstance(actor, str):
                writers.add(actor)
        every = frozenset(move for some in moves.values() for move in some)
        return Dependences(tuple(edges), frozenset(writers), every)


class Check:
    """Verifies that passes have kept everything in order.

    Whether two accesses conflict is judged by bytes, and by whole tensors where a compiler may have
    to copy one whole: a write of a part of a tensor counts for all of it. ::

        before = Dependences.of(graph)        # behind reinplace
        ...                                   # a pass
        Check().verify(graph, before)         # raises GraphOrderError

    The names of a graph's nodes and the storages of their traced values are what before and after
    are compared by; copies of a graph keep both.
    """

    name = "check"

    def __call__(self, graph: Graph) -> int:
        """Checks a graph by itself: starts and waits that were written by hand.

        The graph may be functional. Changes nothing and returns 0.

        Raises:
            GraphOrderError: a node comes before what it takes; a start without a wait for each of
                its parts, unless its ticket leaves the graph; a part that is waited for twice, or
                with other tensors, or that does not exist; a wait whose ticket no start has given;
                a pool that is touched while its blocks are under way. The text names the nodes.
        """
        _check_values(graph)
        if any(transfers.kind_of(op) in _HALVES for op in map(_operator, graph.nodes)):
            _check_pairs(GraphMemory(graph))
        return 0

    def verify(self, graph: Graph, before: Dependences) -> None:
        """Checks that a graph is right by itself and keeps the order that it had.

        Raises:
            GraphOrderError: as above, and if the order is not kept, a transfer or a write is gone,
                or a transfer is new.
        """
        _check_values(graph)
        memory = GraphMemory(graph)
        waits = _check_pairs(memory)
        spans = _spans(memory, waits)
        for edge in before.edges:
            first, second = map(spans.get, edge)
            for actor, span in zip(edge, (first, second), strict=True):
                if span is None and (not isinstance(actor, str) or actor in before.writers):
                    raise GraphOrderError(f"{_describe(actor, None)} is gone")
            if first is None or second is None:
                continue
            if memory.positions[first.end] >= memory.positions[second.begin]:
                raise GraphOrderError(
                    f"{_describe(edge.before, first)} must be over before "
                    f"{_describe(edge.behind, second)}, which comes first now"
                )
        for one, where in spans.items():
            if isinstance(one, Move) and one not in before.moves:
                raise GraphOrderError(f"{_describe(one, where)} was not there before")


def _check_values(graph: Graph) -> None:
    seen: set[Node] = set()
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if read not in seen:
                raise GraphOrderError(f"{node.name} comes before {read.name}, which it takes")
        seen.add(node)


def _check_pairs(memory: GraphMemory) -> dict[Node, dict[int, Node]]:
    """Checks starts and their waits; returns the waits by start and part."""
    waits: dict[Node, dict[int, Node]] = {}
    for wait in memory.transfers.values():
        if wait.kind == transfers.WAIT:
            _match(memory, wait, waits)
    for start in memory.transfers.values():
        if start.kind == transfers.START:
            found = waits.setdefault(start.node, {})
            missing = [part for part in range(len(start.parts)) if part not in found]
            if missing and not _leaves(start.node):
                raise GraphOrderError(
                    f"{start.node.name} ({start.op}) is never waited for: part {missing[0]} of "
                    f"{len(start.parts)} has no swap_blocks_wait in this graph"
                )
            for part, end in sorted(found.items()):
                _check_way(memory, start, part, end)
    return waits


def _match(memory: GraphMemory, wait: Transfer, waits: dict[Node, dict[int, Node]]) -> None:
    name = f"{wait.node.name} ({wait.op})"
    ticket = _issuer(wait.ticket)
    if ticket is None:
        raise GraphOrderError(f"{name} has no ticket")
    if ticket.op == "placeholder":
        return  # its start is not in this graph
    start = memory.transfers.get(ticket)
    if start is None or start.kind != transfers.START:
        raise GraphOrderError(f"{name} waits for {ticket.name}, which is no swap_blocks_start")
    if not 0 <= wait.part < len(start.parts):
        raise GraphOrderError(
            f"{name} waits for part {wait.part} of {ticket.name}, which has {len(start.parts)}"
        )
    other = waits.setdefault(ticket, {}).setdefault(wait.part, wait.node)
    if other is not wait.node:
        raise GraphOrderError(
            f"{name} waits for part {wait.part} of {ticket.name} again, after {other.name}"
        )
    one = start.slices[wait.part]
    for side in ("src", "dst"):
        expected = [memory.memory_of(operand) for operand in getattr(start, side)[one]]
        found = [memory.memory_of(operand) for operand in getattr(wait, side)]
        if expected != found:
            raise GraphOrderError(
                f"{name} waits for part {wait.part} of {ticket.name} with other tensors: "
                f"{side} has to be {_names(getattr(start, side)[one])}, not "
                f"{_names(getattr(wait, side))}"
            )


def _check_way(memory: GraphMemory, start: Transfer, part: int, wait: Node) -> None:
    """Nobody touches what is under way."""
    one = start.slices[part]
    begin, end = memory.positions[start.node], memory.positions[wait]
    for operands, writes in ((start.src[one], False), (start.dst[one], True)):
        for operand in operands:
            touched = memory.memory_of(operand)
            if touched is None:
                continue
            place = memory.conflict_after([Access(touched, writes)], begin)
            if place is not None and place < end:
                what = "touches" if writes else "writes"
                raise GraphOrderError(
                    f"{memory.node_at(place).name} {what} {operand.node.name} while its blocks are "
                    f"under way, from {start.node.name} ({start.op}) to {wait.name}"
                )


def _leaves(start: Node) -> bool:
    """Whether the ticket goes elsewhere than to waits of this graph."""
    tickets = [start]
    if start.target is functional.HOP:
        tickets = [
            user for user in start.users if user.target is operator.getitem and user.args[1] == 0
        ]
    return any(user.op == "output" for ticket in tickets for user in ticket.users)


def _operator(node: Node) -> Any:
    return node.args[0] if node.target is functional.HOP else node.target


def _issuer(ticket: Node | None) -> Node | None:
    if ticket is not None and ticket.target is operator.getitem:
        call = ticket.args[0]
        if isinstance(call, Node) and call.target is functional.HOP and ticket.args[1] == 0:
            return call
    return ticket


def _moves(memory: GraphMemory) -> dict[Node, list[Move]]:
    """The pairs of tensors that swaps and starts move, in the order of their tensors."""
    counts: dict[Move, int] = {}
    found: dict[Node, list[Move]] = {}
    for node, moved in memory.transfers.items():
        if moved.kind == transfers.WAIT or moved.copies_nothing:
            continue
        ids = tuple(one.name if isinstance(one, Node) else one for one in moved.ids)
        for src, dst in zip(moved.src, moved.dst, strict=False):
            key = Move(memory.memory_of(src), memory.memory_of(dst), ids, 0)
            counts[key] = occurrence = counts.get(key, -1) + 1
            found.setdefault(node, []).append(key._replace(occurrence=occurrence))
    return found


def _spans(memory: GraphMemory, waits: dict[Node, dict[int, Node]]) -> dict[Actor, Span]:
    found: dict[Actor, Span] = {node.name: Span(node, node) for node in memory.positions}
    for node, moves in _moves(memory).items():
        ends = [node] * len(moves)
        start = memory.transfers[node]
        if start.kind == transfers.START:
            for part, tensors in enumerate(start.slices):
                wait = waits.get(node, {}).get(part, node)
                ends[tensors] = [wait] * (tensors.stop - tensors.start)
        for move, end in zip(moves, ends, strict=True):
            found[move] = Span(node, end)
            found[Issue(move)] = Span(node, node)
    return found


def _in_order(memory: GraphMemory, moves: dict[Node, list[Move]]) -> Iterator[tuple[Actor, Access]]:
    for node in memory.positions:
        moved = memory.transfers.get(node)
        if moved is None:
            for access in memory.accesses(node):
                yield node.name, access
        for move in moves.get(node, ()):
            for touched, writes in ((move.src, False), (move.dst, True)):
                if touched is not None:
                    yield move, Access(touched, writes)
            for one in moved.id_nodes if moved is not None else ():
                ids = memory.memory(one)
                if ids is not None:
                    yield Issue(move), Access(ids, False)


def _edges(actor: Actor, access: Access, states: RangeMap[_State]) -> Iterator[Edge]:
    for state in states.overlapping(access.memory):
        if state.writer is not None and state.writer != actor:
            yield Edge(state.writer, actor)
        if access.writes:
            for reader in state.readers:
                if reader != actor:
                    yield Edge(reader, actor)
    own = states[access.memory]
    if access.writes:
        own.writer, own.readers = actor, []
    elif actor not in own.readers[-1:]:
        own.readers.append(actor)


def _describe(actor: Actor, span: Span | None) -> str:
    if isinstance(actor, str):
        return actor
    where = "" if span is None else f" by {span.begin.name}"
    move = actor.move if isinstance(actor, Issue) else actor
    return f"the transfer of ids {move.ids}{where}"


def _names(operands: Any) -> str:
    return "[" + ", ".join(operand.node.name for operand in operands) + "]"

"""Blocks are under way while others are computed on."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch.fx import Graph, Node

from . import functional_graph as functional
from . import transfers
from .memory import Access, GraphMemory
from .merge import family
from .transfers import Operand, Transfer

_log = logging.getLogger(__name__)


class Overlap:
    """Starts swaps early and waits for them late, tensor by tensor.

    A load, and a store of what was computed::

        x1 = layer(x0, d0)
        swap_blocks_batch([h1, h2], [d1, d2], s, d)
        x2 = layer(x1, d1)
        x3 = layer(x2, d2)
        swap_blocks_batch([d0], [h0], d, s)
        y = add(x3, 1)
        return y

    becomes ::

        t = swap_blocks_start([h1, h2], [d1, d2], s, d, [1, 1])
        x1 = layer(x0, d0)
        t1 = swap_blocks_start([d0], [h0], d, s)
        swap_blocks_wait(t, [h1], [d1], 0)
        x2 = layer(x1, d1)
        swap_blocks_wait(t, [h2], [d2], 1)
        x3 = layer(x2, d2)
        y = add(x3, 1)
        swap_blocks_wait(t1, [d0], [h0])
        return y

    First every swap moves up to right behind the last node that it needs: what makes its ids and
    pools, what writes its sources or ids, what reads or writes its destinations, a barrier. Then it
    is split. The wait for a pair of tensors comes right before the first node that reads or writes
    the destination or writes the source, before a barrier, or before the output. Pairs with the
    same place are a part; the parts are in the order in which they are needed. A swap that would be
    waited for at once stays whole.

    A swap that needs another transfer would make the stream wait for that one, so it moves up no
    further than to where the swap before it with the same ids stood: a layer ahead.

    Swaps on the same device (both pools on one NPU), and those whose memory is unknown, are left
    alone.
    """

    name = "overlap"

    def __call__(self, graph: Graph) -> int:
        """Changes ``graph``; returns how many swaps it has moved or split."""
        memory = GraphMemory(graph)
        swaps = [
            swap
            for swap in memory.transfers.values()
            if swap.kind == transfers.SWAP and _can_move(memory, swap)
        ]
        hoist = _Hoist(graph, memory, swaps)
        moved = [hoist(swap) for swap in swaps]
        split = [_split(graph, memory, swap) for swap in swaps]
        return sum(map(max, zip(moved, split, strict=True)))


def _can_move(memory: GraphMemory, swap: Transfer) -> bool:
    if memory.is_barrier(swap.node):
        _log.info("%s (%s) is not split: what it touches is unknown", swap.op, swap.node.name)
        return False
    if not swap.in_place or not swap.src:
        return False
    # Copies on one NPU compete with what computes there.
    return "cpu" in {operands[0].node.meta["val"].device.type for operands in (swap.src, swap.dst)}


class _Hoist:
    """Moves swaps up. Those that end up side by side keep their order."""

    def __init__(self, graph: Graph, memory: GraphMemory, swaps: list[Transfer]) -> None:
        self._memory = memory
        self._hoisted: set[Node] = set()
        # So that all of them have room between two neighbours.
        self._step = 1.0 / (len(swaps) + 2)
        self._first = -1.0
        for node in graph.find_nodes(op="placeholder"):
            self._first = max(self._first, memory.positions[node])
        # Where the swap before one of its kind stood: the node above it that stays.
        self._predecessor: dict[Node, float] = {}
        movable = {swap.node for swap in swaps}
        last: dict[Any, float] = {}
        for swap in swaps:
            kind = family(swap)
            if kind in last:
                self._predecessor[swap.node] = last[kind]
            above = swap.node.prev
            while above in movable or memory.is_view(above):
                above = above.prev
            last[kind] = memory.positions.get(above, -1.0)

    def __call__(self, swap: Transfer) -> bool:
        """Whether the swap has moved."""
        memory, node = self._memory, swap.node
        anchor = self._last_needed(node)
        if anchor is None:
            return False
        while (behind := anchor.next) in self._hoisted:
            anchor = behind
        views: list[Node] = []
        while behind is not node and memory.is_view(behind):
            views.append(behind)
            behind = behind.next
        if behind is node:
            self._hoisted.update(views, (node,))  # it is there already
            return False
        position = memory.positions[anchor] + self._step
        for view in memory.views_to_move(node, position) or ():
            anchor.append(view)
            memory.positions[view] = position - self._step / 2
            self._hoisted.add(view)
            anchor = view
        anchor.append(node)
        memory.move(node, position)
        self._hoisted.add(node)
        return True

    def _last_needed(self, node: Node) -> Node | None:
        memory = self._memory
        here = memory.positions[node]
        found = (
            memory.conflict_before(memory.accesses(node), here),
            memory.barrier_before(here),
            self._first,
        )
        last = max(position for position in found if position is not None)
        if last >= 0 and memory.node_at(last) in memory.transfers:
            # The stream would wait there for the other transfer.
            last = max(last, self._predecessor.get(node, last))
        waiting = list(node.all_input_nodes)
        while waiting:
            one = waiting.pop()
            if memory.positions[one] <= last:
                continue
            if memory.is_view(one):
                waiting += one.all_input_nodes
            else:
                last = memory.positions[one]
        return memory.node_at(last) if last >= 0 else None


def _split(graph: Graph, memory: GraphMemory, swap: Transfer) -> bool:
    node = swap.node
    here = memory.positions[node]
    next_work = _next_work(memory, node)
    pairs = list(zip(swap.src, swap.dst, strict=True))
    places = [_place(memory, pair, here, next_work) for pair in pairs]
    if all(place <= memory.positions[next_work] for place in places):
        return False
    order = sorted(range(len(pairs)), key=places.__getitem__)
    parts = [list(part) for _, part in itertools.groupby(order, key=places.__getitem__)]
    src, dst = ([pair[side].node for pair in pairs] for side in (0, 1))
    sides = [[tensors[i] for i in order] for tensors in (src, dst)]
    start_args: list[Any] = [*sides, *swap.ids]
    if len(parts) > 1:
        start_args.append([len(part) for part in parts])
    start_op = getattr(torch.ops.npu_kv.swap_blocks_start, swap.op._overloadname)
    with graph.inserting_before(node):
        start = graph.call_function(start_op, tuple(start_args))
    value = src[0].meta["val"]
    with functional.traced_like(value):
        ticket = torch.empty((), dtype=torch.int64, device="cpu")
    start.meta = {**node.meta, "val": ticket}
    for number, part in enumerate(parts):
        with graph.inserting_before(memory.node_at(places[part[0]])):
            wait = graph.call_function(
                torch.ops.npu_kv.swap_blocks_wait.default,
                (start, [src[i] for i in part], [dst[i] for i in part], number),
            )
        wait.meta = {**node.meta, "val": None}
    memory.replace(node, start)
    graph.erase_node(node)
    return True


def _next_work(memory: GraphMemory, node: Node) -> Node:
    """The first node behind a swap that takes time, or the output."""
    node = node.next
    while node.op != "output" and not memory.takes_time(node):
        node = node.next
    return node


def _place(memory: GraphMemory, pair: tuple[Operand, Operand], here: float, last: Node) -> float:
    """The position of the node before which the copies of a pair of tensors must be done."""
    accesses = []
    for operand, writes in zip(pair, (False, True), strict=True):
        touched = memory.memory_of(operand)
        if touched is None:
            return memory.positions[last]
        accesses.append(Access(touched, writes))
    found = (memory.conflict_after(accesses, here), memory.barrier_after(here), memory.end)
    return min(place for place in found if place is not None)

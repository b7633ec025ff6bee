"""One call instead of many."""

from __future__ import annotations

import logging
from typing import Any

from torch.fx import Graph, Node

from . import transfers
from .memory import Access, GraphMemory
from .transfers import Transfer

_log = logging.getLogger(__name__)


class Merge:
    """Makes one swap of swaps in one direction with the same ids.

    A call costs a callback, a wake-up of the scheduler and a wait, however little it copies. ::

        swap_blocks_batch([h0], [d0], s, d)
        x1 = layer(x0, d0)
        swap_blocks_batch([h1], [d1], s, d)
        x2 = layer(x1, d1)

    becomes ::

        swap_blocks_batch([h0, h1], [d0, d1], s, d)
        x1 = layer(x0, d0)
        x2 = layer(x1, d1)

    A swap joins the first one with the very same id tensors, or equal lists, when it may move up to
    there: its pools exist there, nothing in between writes its sources or ids, or reads or writes
    its destinations, and it overlaps no destination of the other and with no destination of its own
    anything of the other: the copies within a call are unordered. Otherwise it begins a group of
    its own. Swaps never move down. Starts and waits that were written by hand stay as they are.
    """

    name = "merge"

    def __call__(self, graph: Graph) -> int:
        """Changes ``graph``; returns how many swaps have joined another."""
        memory = GraphMemory(graph)
        leaders: dict[Any, Transfer] = {}
        members: dict[Node, list[Transfer]] = {}
        for node, swap in memory.transfers.items():
            if swap.kind != transfers.SWAP or not _can_move(memory, swap):
                continue
            key = family(swap)
            leader = leaders.get(key)
            if leader is not None and _join(memory, swap, leader):
                members[leader.node].append(swap)
            else:
                leaders[key] = swap
                members[node] = [swap]
        for node, group in members.items():
            if len(group) > 1:
                _merge(graph, node, group)
        return sum(len(group) - 1 for group in members.values())


def _can_move(memory: GraphMemory, swap: Transfer) -> bool:
    if memory.is_barrier(swap.node):
        _log.info("%s (%s) is not merged: what it touches is unknown", swap.op, swap.node.name)
        return False
    return swap.in_place and bool(swap.src)


def family(swap: Transfer) -> tuple[Any, ...]:
    """The same for swaps in one direction with the same ids."""
    devices = (operands[0].node.meta["val"].device for operands in (swap.src, swap.dst))
    return (swap.op, *devices, *swap.ids)


def _join(memory: GraphMemory, swap: Transfer, leader: Transfer) -> bool:
    here, there = memory.positions[swap.node], memory.positions[leader.node]
    barrier = memory.barrier_before(here)
    if barrier is not None and barrier > there:
        return False
    accesses: list[Access] = list(memory.accesses(swap.node))
    conflict = memory.conflict_before(accesses, here)
    if conflict is not None and conflict >= there:
        # With one in between or with the leader. What has joined another counts where it stood: who
        # needs another transfer does not join above it, and so does not wait for it early.
        return False
    views = memory.views_to_move(swap.node, there)
    if views is None:
        return False
    for view in views:
        leader.node.prepend(view)
        memory.positions[view] = there - 0.5
    return True


def _merge(graph: Graph, node: Node, group: list[Transfer]) -> None:
    first = group[0]
    src = [operand.node for swap in group for operand in swap.src]
    dst = [operand.node for swap in group for operand in swap.dst]
    node.args = (src, dst, *first.ids)
    node.kwargs = {}
    for swap in group[1:]:
        graph.erase_node(swap.node)

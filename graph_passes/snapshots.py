"""What a graph was, to go back to."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import map_arg


class _Record(NamedTuple):
    """What makes up a node. ``args`` and ``kwargs`` are never changed, only replaced."""

    node: Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    type: Any
    meta: dict[str, Any]


Snapshot = list[_Record]


def snapshot(graph: Graph) -> Snapshot:
    """Notes the nodes of a graph; far cheaper than a copy of it."""
    return [
        _Record(
            node, node.op, node.target, node.args, node.kwargs, node.name, node.type, {**node.meta}
        )
        for node in graph.nodes
    ]


def is_unchanged(graph: Graph, kept: Snapshot) -> bool:
    """Whether a graph has the nodes, in their order and with the arguments, that it had."""
    nodes = list(graph.nodes)
    return len(nodes) == len(kept) and all(
        node is was.node
        and node.target is was.target
        and node.args is was.args
        and node.kwargs is was.kwargs
        for node, was in zip(nodes, kept, strict=True)
    )


def restore(graph: Graph, kept: Snapshot) -> None:
    """Makes ``graph`` what it was when ``kept`` was taken of it.

    The ``Graph`` stays the same object, because compilers hold on to it; its nodes are new ones,
    with the names that they had.
    """
    nodes = list(graph.nodes)
    for node in nodes:  # so that none has users any more, in whatever order a pass has left them
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
    # A graph never gives the name of an erased node again.
    graph._graph_namespace = type(graph._graph_namespace)()
    made: dict[Node, Node] = {}
    for was in kept:
        args, kwargs = (map_arg(one, made.__getitem__) for one in (was.args, was.kwargs))
        node = graph.create_node(was.op, was.target, args, kwargs, was.name, was.type)
        node.meta = {**was.meta}
        made[was.node] = node

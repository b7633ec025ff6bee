"""No clone of a pool survives."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from torch.fx import Graph, Node

from . import functional_graph as functional

_log = logging.getLogger(__name__)


class Reinplace:
    """Puts the operators back to work in place, where the compiler itself would clone.

    torch_npu's compilers clone every tensor of a call but one when several of them lie in one
    storage (layers that are views of one allocation), and copy it back behind the call. ::

        n = auto_functionalized_v2(swap_blocks_batch, src_blocks=s, ..., _all_bases=[a, b])
        a1 = getitem(n, 1); b1 = getitem(n, 2)
        y = add(b1, 1)
        copy_(a, a1); copy_(b, b1)

    becomes ::

        swap_blocks_batch([a], [b], s, d)
        y = add(b, 1)

    That is right when nobody reads an old ``a`` or ``b`` behind the call, and when they are not
    parts of one another. Otherwise the node is left to the compiler, which clones, and the reason
    is logged. So are calls whose tensors have a storage each, where compilers do well.

    To run behind the compiler's removal of clones: what is a copy of ``b`` before it may be ``b``
    itself afterwards.
    """

    name = "reinplace"

    def __call__(self, graph: Graph) -> int:
        """Changes ``graph``; returns how many calls it has put in place."""
        calls = [call for call in functional.operator_nodes(graph) if _needs_help(call)]
        # All are judged before any is changed: afterwards the traced values of views no longer tell
        # what they are views of. The last first, because a call may hand its result to a later one.
        in_place: list[Node] = []
        for call in reversed(calls):
            reason = _reason_against(graph, call, in_place)
            if reason is None:
                in_place.append(call)
            else:
                _log.info("%s stays functional: %s", functional.name_of(call), reason)
        for call in reversed(in_place):
            _put_in_place(call)
        if in_place:
            functional.erase_self_copies(graph)
        return len(in_place)


def _needs_help(call: Node) -> bool:
    pairs = itertools.combinations(map(functional.origin, functional.bases(call)), 2)
    return any(functional.share_a_storage(one, other) for one, other in pairs)


def _reason_against(graph: Graph, call: Node, in_place: list[Node]) -> str | None:
    bases = functional.bases(call)
    for index, base in enumerate(bases):
        if functional.memory_of(base) is None:
            return f"the memory of {base.name} is unknown"
        for other in bases[:index]:
            origins = functional.origin(base), functional.origin(other)
            if functional.may_overlap(base, other) or functional.may_overlap(*origins):
                return f"{other.name} and {base.name} may overlap"
    contents = [_contents(call, index, in_place) for index in range(len(bases))]
    behind = itertools.dropwhile(lambda node: node is not call, graph.nodes)
    next(behind)
    for node in behind:
        for read in node.all_input_nodes:
            for base, own in zip(bases, contents, strict=True):
                if not functional.may_overlap(read, base):
                    continue
                if read is base and any(functional.puts(node, value, base) for value in own):
                    continue
                return f"{node.name} reads what {read.name} was before it"
    return None


def _contents(call: Node, index: int, in_place: list[Node]) -> set[Node]:
    """What base ``index`` holds after the call, and after later calls that are put in place too."""
    found = set(functional.results(call).get(index, ()))
    for later in reversed(in_place):
        for number, base in enumerate(functional.bases(later)):
            if base in found:
                found.update(functional.results(later).get(number, ()))
    return found


def _put_in_place(call: Node) -> None:
    # What the compiler does with a node of which it has found that no tensor needs a clone; it
    # would find anew, so it is done here.
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense
    from torch._inductor.pattern_matcher import (
        CallFunctionVarArgs,
        Match,
        PatternMatcherPass,
        register_graph_pattern,
    )
    from torch.utils import _pytree as pytree

    one_call = PatternMatcherPass()

    @register_graph_pattern(
        CallFunctionVarArgs(call.target),
        extra_check=lambda match: match.nodes[0] is call,
        pass_dict=one_call,
    )
    def _(match: Match, *args: Any, **kwargs: Any) -> None:
        flat, spec = pytree.tree_flatten((args, kwargs))

        def in_place(*flat: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(flat, spec)
            return auto_functionalized_v2_dense(args[0], (), **kwargs)

        match.replace_by_example(in_place, flat, run_functional_passes=False)

    one_call.apply(call.graph)

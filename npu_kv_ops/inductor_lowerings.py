"""Reads that inductor puts off must not be put off past an operator that writes what they read.

Inductor computes ``before = pool * 2`` where it is used, unless ``pool`` is written before that:
then it makes a buffer of it at the write. For an operator that it does not know (a fallback kernel)
it makes that buffer behind the operator, so that ``before`` is computed from what the operator has
written (torch 2.13: any custom operator with a mutable argument, in a graph with gradients or with
``reorder_for_locality=False``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_OPERATORS = ("swap_blocks_batch", "swap_blocks_start", "swap_blocks_wait")


@functools.cache
def register() -> None:
    """Has inductor make those buffers before the operators of this package.

    To be called when inductor is loaded; more than once does no harm.
    """
    for name in _OPERATORS:
        packet = getattr(torch.ops.npu_kv, name)
        for overload in (getattr(packet, one) for one in packet.overloads()):
            if overload._schema.is_mutable:
                _register(overload)


def _register(overload: OpOverload) -> None:
    from torch._inductor import lowering as inductor

    lowering: Any = inductor  # which is not typed
    if overload not in lowering.lowerings:  # as inductor itself would at the first use
        tag = torch._library.utils.get_layout_constraint_tag(overload, with_default=True)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(overload, layout_constraint=constraint, warn=False)
    lowering.lowerings[overload] = _behind_reads(overload, lowering.lowerings[overload])


def _behind_reads(overload: OpOverload, fallback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fallback)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        for tensor in _written(overload, args, kwargs):
            tensor.realize()
            V.graph.mark_buffer_mutated(tensor.get_name())
        return fallback(*args, **kwargs)

    return lowered


def _written(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for info, value in torch._library.utils.zip_schema(overload._schema, args, kwargs):
        if info.alias_info is not None and info.alias_info.is_write:
            yield from tree_leaves(value)

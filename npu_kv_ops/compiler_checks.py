"""What can be told about a call of the operator while it is compiled, before any graph is captured.

The fake kernels call :func:`at_trace`. An error there stops the compile; one in the kernel itself,
during a capture of npugraph_ex, would leave the compiled function broken until
``torch._dynamo.reset()``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator

from npu_kv_ops import inductor_lowerings

_CPU_IDS = (
    "npu_kv::swap_blocks_batch in a graph for {compiler}: src_blocks and dst_blocks are CPU "
    "tensors, which would be read once, at the capture, so that every replay copies the same "
    "blocks. Pass them as NPU tensors, which are read at every replay, or, if the same blocks are "
    "meant, as lists of int to the .static overload"
)
_GE = "torchair max-autotune"
_GE_GRAPH = (
    "npu_kv::{operator} cannot be part of a GE graph (torchair's mode "
    "'max-autotune'), which would take host tensors for device memory. Use "
    "torch.compile(backend='npugraph_ex') or torchair's mode 'reduce-overhead', or keep the call "
    "out of the graph with torch.compiler.disable"
)


def at_trace(overload: str, reads_cpu_ids: bool) -> None:
    """Refuse what the compiler under way would get wrong.

    Args:
        overload: of ``swap_blocks_batch``.
        reads_cpu_ids: whether the call has CPU ids and tensors on an NPU.

    Raises:
        RuntimeError: the compiler captures a graph, which CPU ids do not fit, or makes a GE graph.
    """
    if "torchair.core" in sys.modules:  # torch_npu puts a "torchair" there that loads itself late
        _register_converters()
    if "torch._inductor.lowering" in sys.modules:
        inductor_lowerings.register()
    compiler = _compiler()
    if compiler == _GE:
        raise RuntimeError(_GE_GRAPH.format(operator=f"swap_blocks_batch.{overload}"))
    if compiler is not None and reads_cpu_ids:
        raise RuntimeError(_CPU_IDS.format(compiler=compiler))


def _compiler() -> str | None:
    """The compiler that Dynamo traces for, if it is known to make graphs that are replayed."""
    compiler = _compiler_fn()
    name, function = getattr(compiler, "compiler_name", ""), compiler
    options = getattr(compiler, "kwargs", {}).get("options") or {}
    if hasattr(compiler, "compiler_fn"):
        function = compiler.compiler_fn
    bound = function.keywords if isinstance(function, functools.partial) else {}
    module = getattr(getattr(function, "func", function), "__module__", "")
    if module == "npu_kv_ops.compile":
        return _inner(bound.get("options", options))
    if name == "npugraph_ex":
        return _npugraph_ex(options)
    if module.startswith("torchair."):
        return _torchair(bound.get("compiler_config"))
    return None


def _compiler_fn() -> Any:
    try:
        # torch has no public way to ask; without an answer the kernel refuses at the capture.
        return InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None


def _inner(options: Any) -> str | None:
    """The compiler that the backend npu_kv hands the graph to."""
    from npu_kv_ops.compile import Options

    try:
        asked = Options.of(options)
        if asked.inner == "torchair":
            return _torchair(asked.torchair_config())
    except ValueError:
        return None  # the backend itself says so
    return _npugraph_ex(asked.inner_options) if asked.inner == "npugraph_ex" else None


def _npugraph_ex(options: Any) -> str | None:
    return None if options.get("force_eager") else "npugraph_ex"


def _torchair(config: Any) -> str | None:
    if config is None:
        return _GE
    if config.debug.run_eagerly.value in (True, "1"):
        return None
    return _GE if config.mode.value == "max-autotune" else "torchair"


@functools.cache
def _register_converters() -> None:
    """For a GE graph that was not recognised: torchair would make a converter of its own."""
    import torch
    import torchair

    for name in ("swap_blocks_batch", "swap_blocks_start", "swap_blocks_wait"):
        packet = getattr(torch.ops.npu_kv, name)
        for overload in packet.overloads():
            torchair.register_fx_node_ge_converter(getattr(packet, overload))(
                functools.partial(_refuse_conversion, f"{name}.{overload}")
            )


def _refuse_conversion(operator: str, *_: object, **__: object) -> None:
    raise RuntimeError(_GE_GRAPH.format(operator=operator))

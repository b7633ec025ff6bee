"""The ways into compilers: their options with the passes of this package in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from .manager import GraphPass, PassManager

_OPTION = "post_grad_custom_post_pass"
_STRIDES = "eager_input_vals"
CompilerPass = Callable[[GraphModule, Any, Any], None]
Passes = PassManager | Sequence[GraphPass] | None


class InductorPasses(CustomGraphPass):
    """A :class:`PassManager` as inductor calls its passes, with an id for inductor's cache.

    Args:
        passes: the manager, or passes for one; None: those of this package.
    """

    def __init__(self, passes: Passes = None) -> None:
        self.manager = _manager(passes)

    def __call__(self, graph: Graph) -> None:
        """Runs the passes on ``graph``, which has to belong to a module."""
        module = graph.owning_module
        if module is None:
            raise ValueError("graph: it belongs to no module")
        if self.manager(module).changed:
            _tell_strides(graph)

    def uuid(self) -> str | None:
        """See :meth:`PassManager.uuid`; None, and nothing is cached, if that is None."""
        return self.manager.uuid()


def npugraph_ex_options(passes: Passes = None, **options: Any) -> dict[str, Any]:
    """Options for ``torch.compile(backend="npugraph_ex", options=...)`` with the passes in them.

    Args:
        passes: the manager that runs them, or passes for one; None: those of this package.
        options: further options of npugraph_ex. A ``post_grad_custom_post_pass`` among them runs
            before ``passes``.

    Example:
        ``torch.compile(model, backend="npugraph_ex", options=npugraph_ex_options())``
    """
    return {**options, _OPTION: _compiler_pass(passes, options.get(_OPTION))}


def torchair_config(config: Any, passes: Passes = None) -> Any:
    """Puts the passes into a ``torchair.CompilerConfig`` in mode ``reduce-overhead``.

    Args:
        config: the configuration, which is changed. A ``post_grad_custom_post_pass`` that is set
            runs before ``passes``.
        passes: the manager that runs them, or passes for one; None: those of this package.

    Returns:
        ``config``.
    """
    setattr(config, _OPTION, _compiler_pass(passes, getattr(config, _OPTION).value))
    return config


def inductor_options(passes: Passes = None, **options: Any) -> dict[str, Any]:
    """Options for ``torch.compile(backend="inductor", options=...)`` with the passes in them.

    Args:
        passes: the manager that runs them, or passes for one; None: those of this package.
        options: further options of inductor. A ``post_grad_custom_post_pass`` among them, else one
            that ``torch._inductor.config`` has now, runs before ``passes``.
            ``reorder_for_locality`` is False if it is not among them: it moves what reads a pool
            before a swap behind it, and the pool would be cloned for that.

    Example:
        ``torch.compile(model, options=inductor_options())``
    """
    from torch._inductor import config

    before = options.get(_OPTION, config.post_grad_custom_post_pass)
    ours = [*get_custom_graph_passes(before), InductorPasses(passes)]
    return {"reorder_for_locality": False, **options, _OPTION: ours}


def _tell_strides(graph: Graph) -> None:
    # Inductor gives the tensors of an operator the strides that it has noted when it was traced: of
    # another call, if the passes have merged or split it.
    for node in graph.nodes:
        if getattr(node.target, "namespace", None) != "npu_kv":
            continue
        node.meta.pop(_STRIDES, None)
        if all("val" in one.meta for one in node.all_input_nodes):
            given = (map_arg(one, lambda of: of.meta["val"]) for one in (node.args, node.kwargs))
            node.meta[_STRIDES] = tuple(given)


def _manager(passes: Passes) -> PassManager:
    return passes if isinstance(passes, PassManager) else PassManager(passes)


class _TorchNpuPasses:
    """A manager as the compilers of torch_npu call their passes, behind a pass of the user."""

    def __init__(self, manager: PassManager, before: CompilerPass | None) -> None:
        self.manager = manager
        self.before = before

    def __call__(self, module: GraphModule, example_inputs: Any, config: Any) -> None:
        if self.before is not None:
            self.before(module, example_inputs, config)
        self.manager(module)


def _compiler_pass(passes: Passes, before: CompilerPass | None) -> CompilerPass:
    if isinstance(before, _TorchNpuPasses):  # options that were made before are made again
        before = before.before
    return _TorchNpuPasses(_manager(passes), before)

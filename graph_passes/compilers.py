"""The ways into the compilers of torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from .reinplace import Reinplace

_OPTION = "post_grad_custom_post_pass"
CompilerPass = Callable[[GraphModule, Any, Any], None]


def npugraph_ex_options(**options: Any) -> dict[str, Any]:
    """Options for ``torch.compile(backend="npugraph_ex", options=...)`` with the passes in them.

    Args:
        options: further options of npugraph_ex. A ``post_grad_custom_post_pass`` among them runs
            before the passes of this package.

    Example:
        ``torch.compile(model, backend="npugraph_ex", options=npugraph_ex_options())``
    """
    return {**options, _OPTION: _pass(options.get(_OPTION))}


def torchair_config(config: Any) -> Any:
    """Puts the passes into a ``torchair.CompilerConfig`` in mode ``reduce-overhead``.

    Args:
        config: the configuration, which is changed. A ``post_grad_custom_post_pass`` that is set
            runs before the passes of this package.

    Returns:
        ``config``.
    """
    setattr(config, _OPTION, _pass(getattr(config, _OPTION).value))
    return config


def _pass(before: CompilerPass | None) -> CompilerPass:
    def npu_kv_passes(module: GraphModule, example_inputs: Any, config: Any) -> None:
        if before is not None:
            before(module, example_inputs, config)
        if Reinplace()(module.graph):
            module.graph.lint()
            module.recompile()

    return npu_kv_passes

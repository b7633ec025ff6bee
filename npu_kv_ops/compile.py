"""``torch.compile(backend="npu_kv")``: another backend, with the graph passes of this package.

Registered by the entry point of the package, so the name works without an import, and by the import
of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import npu_kv_ops.ops  # noqa: F401 - whoever compiles for npu_kv uses its operators

import torch  # isort: skip
from torch._dynamo.backends import registry
from torch.fx import Graph, GraphModule

NAME = "npu_kv"


@dataclass(frozen=True)
class Options:
    """The ``options`` of the backend.

    Attributes:
        inner: the backend that compiles: ``"npugraph_ex"``, ``"torchair"`` (mode reduce-overhead),
            ``"inductor"`` or ``"eager"``. None: npugraph_ex where there is an NPU, else inductor;
            and inductor for a graph whose inputs are all CPU tensors: a capture sees none of it.
            ``"eager"`` runs the graph behind the passes as it is and captures nothing.
        passes: a :class:`~npu_kv_ops.graph_passes.PassManager`, or passes for one; None: those of
            this package.
        disable: names of passes to leave out.
        dump_to: folder for the graphs before and after each pass.
        inner_options: options of the inner backend. For torchair attributes of its
            ``CompilerConfig`` with their values, ``{"debug.run_eagerly": True}``, or such a
            configuration; ``"eager"`` has none.
    """

    inner: str | None = None
    passes: Any = None
    disable: Sequence[str] = ()
    dump_to: str | None = None
    inner_options: Any = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, example_inputs: Sequence[Any] = ()) -> Options:
        """Checked options, with ``inner`` decided for a graph with these inputs.

        Raises:
            ValueError: an option or an ``inner`` that there is not; ``disable`` or ``dump_to``
                beside a manager, which has its own; ``inner_options`` for ``"eager"``.
        """
        known = [one.name for one in fields(cls)]
        for name in options or ():
            if name not in known:
                raise ValueError(f"options: npu_kv has no option {name!r}; there are {known}")
        given = {name: value for name, value in (options or {}).items() if value is not None}
        made = cls(**given)
        if made.inner is None:
            made = cls(**{**made.__dict__, "inner": _default_inner(example_inputs)})
        if made.inner not in _INNER:
            raise ValueError(f"inner is {made.inner!r}; there are {list(_INNER)}")
        if made.inner == "eager" and made.inner_options:
            raise ValueError(f"inner_options: 'eager' has none, got {made.inner_options!r}")
        return made

    def manager(self) -> Any:
        """The :class:`~npu_kv_ops.graph_passes.PassManager` they ask for."""
        from npu_kv_ops.graph_passes import PassManager  # type: ignore[import-not-found]

        if not isinstance(self.passes, PassManager):
            return PassManager(self.passes, self.disable, self.dump_to)
        if self.disable or self.dump_to is not None:
            raise ValueError("passes is a PassManager: give disable and dump_to to that")
        return self.passes

    def torchair_config(self) -> Any:
        """The ``torchair.CompilerConfig`` they ask for.

        Raises:
            ValueError: its mode is ``max-autotune``; it has no such option.
        """
        import torchair

        config = self.inner_options
        if isinstance(config, Mapping):
            config = torchair.CompilerConfig()
            config.mode = "reduce-overhead"
            for path, value in self.inner_options.items():
                _set(config, path, value)
        if config.mode.value == "max-autotune":
            raise ValueError(
                "inner_options: torchair's mode 'max-autotune' makes a GE graph, which cannot hold "
                "copies; use 'reduce-overhead'"
            )
        return config


def npu_kv(
    module: GraphModule, example_inputs: list[torch.Tensor], *, options: Any = None, **others: Any
) -> Any:
    """The backend. Dynamo calls it with a graph; users call ``torch.compile(backend="npu_kv")``.

    Args:
        module: the graph.
        example_inputs: fake tensors for its inputs.
        options: see :class:`Options`.
        others: refused.

    Raises:
        ValueError: options that there are not. Dynamo wraps it into ``BackendCompilerFailed``.
        RuntimeError: torchair behind npugraph_ex in one process.

    Example:
        ``torch.compile(model, backend="npu_kv", options={"inner": "npugraph_ex"})``
    """
    if others:
        raise ValueError(f"npu_kv takes options, not {sorted(others)}")
    asked = Options.of(options, example_inputs)
    return _INNER[str(asked.inner)](module, example_inputs, asked)


def _npugraph_ex(module: GraphModule, example_inputs: list[torch.Tensor], asked: Options) -> Any:
    from npu_kv_ops.graph_passes import npugraph_ex_options

    options = npugraph_ex_options(asked.manager(), **asked.inner_options)
    backend: Any = registry.lookup_backend("npugraph_ex")
    return backend(module, example_inputs, options=options)


def _torchair(module: GraphModule, example_inputs: list[torch.Tensor], asked: Options) -> Any:
    from npu_kv_ops.graph_passes import torchair_config

    _must_not_follow_npugraph_ex()
    import torchair

    config = torchair_config(asked.torchair_config(), asked.manager())
    return torchair.get_npu_backend(compiler_config=config)(module, example_inputs)


def _inductor(module: GraphModule, example_inputs: list[torch.Tensor], asked: Options) -> Any:
    from npu_kv_ops.graph_passes import inductor_options

    options = inductor_options(asked.manager(), **asked.inner_options)
    wrapper: Any = torch._TorchCompileInductorWrapper  # which checks the options
    return wrapper(None, options, None)(module, example_inputs)


def _eager(module: GraphModule, example_inputs: list[torch.Tensor], asked: Options) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.fx_passes import post_grad

    manager = asked.manager()
    decompose: Callable[[Graph], None] = post_grad.decompose_auto_functionalized

    def compiler(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        manager(module)
        decompose(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    # The graph itself writes its inputs, as in npugraph_ex.
    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    return backend(module, example_inputs)


_INNER: dict[str, Callable[[GraphModule, list[torch.Tensor], Options], Any]] = {
    "npugraph_ex": _npugraph_ex,
    "torchair": _torchair,
    "inductor": _inductor,
    "eager": _eager,
}


def _default_inner(example_inputs: Sequence[Any]) -> str:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return "inductor"
    devices = {one.device.type for one in example_inputs if isinstance(one, torch.Tensor)}
    return "inductor" if devices == {"cpu"} else "npugraph_ex"


def _set(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent, None)
    if not hasattr(config, name):
        raise ValueError(f"inner_options: torchair's CompilerConfig has no {path!r}")
    setattr(config, name, value)


def _must_not_follow_npugraph_ex() -> None:
    # torchair cannot register this kernel if npugraph_ex has; the other way round works.
    kernel = torch.ops.aten.to.other.py_kernels.get(torch._C.DispatchKey.AutogradPrivateUse1)
    if "npugraph_ex" in getattr(kernel, "__module__", ""):
        raise RuntimeError(
            "inner 'torchair': npugraph_ex was used in this process, and torchair cannot be used "
            "after it in this version of torch_npu. Use inner 'npugraph_ex'"
        )


def _register() -> None:
    # When Dynamo is loading this module for its entry point it registers the result itself.
    if NAME not in registry._BACKENDS and NAME not in registry._COMPILER_FNS:
        registry.register_backend(npu_kv, NAME)


_register()

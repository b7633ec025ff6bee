"""FX passes for graphs that contain npu_kv operators, one pass a module.

:class:`PassManager` runs them. :func:`npugraph_ex_options`, :func:`torchair_config` and
:func:`inductor_options` hand them to a compiler, ``torch.compile(backend="npu_kv")`` to all.
The folder lies beside the package and is installed as ``npu_kv_ops.graph_passes``.
"""

from __future__ import annotations

from .check import Check, Dependences, GraphOrderError
from .compilers import InductorPasses, inductor_options, npugraph_ex_options, torchair_config
from .manager import GraphPass, PassManager, PassReport, PassRun, default_passes
from .memory import touches_only_its_arguments
from .merge import Merge
from .overlap import Overlap
from .reinplace import Reinplace

__all__ = [
    "Check",
    "Dependences",
    "GraphOrderError",
    "GraphPass",
    "InductorPasses",
    "Merge",
    "Overlap",
    "PassManager",
    "PassReport",
    "PassRun",
    "Reinplace",
    "default_passes",
    "inductor_options",
    "npugraph_ex_options",
    "torchair_config",
    "touches_only_its_arguments",
]

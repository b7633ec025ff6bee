"""FX passes for graphs that contain npu_kv operators, one pass a module.

:func:`npugraph_ex_options` and :func:`torchair_config` hand them to the compilers of torch_npu. The
folder lies beside the package and is installed as ``npu_kv_ops.graph_passes``.
"""

from __future__ import annotations

from .compilers import npugraph_ex_options, torchair_config
from .reinplace import Reinplace

__all__ = ["Reinplace", "npugraph_ex_options", "torchair_config"]

"""FX passes for graphs that contain npu_kv operators, one pass a module.

The folder lies beside the package and is installed as ``npu_kv_ops.graph_passes``.
"""

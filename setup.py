import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))
from npu_kv_build import COMMANDS

packages = find_packages(include=["npu_kv_ops", "npu_kv_ops.*"])
passes = ["npu_kv_ops.graph_passes"]
passes += [f"npu_kv_ops.graph_passes.{name}" for name in find_packages("graph_passes")]

setup(
    packages=packages + passes,
    package_dir={"npu_kv_ops.graph_passes": "graph_passes"},
    # CMake builds it and everything else; its being here makes the wheel one for this platform.
    ext_modules=[Extension("npu_kv_ops._C", sources=[])],
    cmdclass=COMMANDS,
)

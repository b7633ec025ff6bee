"""Keeping torch_npu from warning about what a machine without CANN can not have.

Three messages appear in every program that uses torch_npu on the simulator:

* ``Warning: ASCEND_HOME_PATH environment variable is not set.``, printed when torch_npu is imported
  and looks for the folders of a CANN installation. The check is left out, unless the variable is
  set.
* ``The current CANN and Soc versions require processing for 32 padding size``, written by torch_npu
  itself at the first allocation on any 910B. ``TORCH_NPU_WARNING_DISABLE=1``, torch_npu's own
  switch for such lines, is set as a default; set it to 0 to see them.
* ``Cannot create tensor with internal format while allow_internal_format=False``, a Python warning
  at the first ``zeros``; a filter for exactly this text.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["silence_torch_npu"]

_CHECKING_MODULE = "torch_npu._init.registry.registry_manager"
_CHECK = "_cann_package_check"


def silence_torch_npu() -> None:
    """Set up the three measures of this module; torch_npu must not be imported yet."""
    if "TORCH_NPU_DISABLED_WARNING" not in os.environ:  # the switch's older name
        os.environ.setdefault("TORCH_NPU_WARNING_DISABLE", "1")
    warnings.filterwarnings(
        "ignore", message="Cannot create tensor with internal format while allow_internal_format"
    )
    if "ASCEND_HOME_PATH" not in os.environ:
        sys.meta_path.insert(0, _CheckFinder())


class _CheckFinder(importlib.abc.MetaPathFinder):
    """Finds the one module that checks CANN's folders, and has it loaded without the check."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _CHECKING_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithoutCheck(spec.loader)
        return spec


class _WithoutCheck(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if hasattr(module, _CHECK):
            setattr(module, _CHECK, lambda: None)

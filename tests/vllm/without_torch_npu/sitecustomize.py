"""Hides torch_npu from the processes that have this folder in PYTHONPATH, and from their children.

A CPU machine that serves with vLLM has no torch_npu. The environment of the tests has, for the
worker on the simulated NPU, and transformers imports it wherever it is installed, which fails
without CANN.
"""

import sys

sys.modules["torch_npu"] = None  # type: ignore[assignment]

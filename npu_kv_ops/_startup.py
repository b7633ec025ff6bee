"""What ``NPU_KV_RUNTIME=sim`` and ``=host`` do when the interpreter starts.

``npu_kv_ops.pth`` in site-packages calls :func:`apply` before any user code, and only when the
variable has one of these two values. So a script whose first line is ``import torch`` runs on the
simulated runtime without a change.
"""

from __future__ import annotations

import os
import sys


def apply() -> None:
    """Prepare this process for the runtime that ``NPU_KV_RUNTIME`` names.

    ``sim`` activates the simulator; ``host`` keeps ``import torch`` from loading torch_npu. A
    failure is printed and not raised, because an interpreter that is starting can only report it;
    :func:`npu_kv_ops.runtime.load` raises it again.
    """
    asked = os.environ.get("NPU_KV_RUNTIME")
    if asked == "host":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    elif asked == "sim":
        try:
            from npu_kv_ops import simulator

            simulator.activate()
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            print(f"npu_kv_ops: NPU_KV_RUNTIME=sim cannot be honoured: {error}", file=sys.stderr)

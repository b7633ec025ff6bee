"""KV-cache offloading for vLLM: ``NpuKVOffloadConnector``.

vLLM finds it with ``"kv_connector": "NpuKVOffloadConnector"`` and ``"kv_connector_module_path":
"npu_kv_ops.integrations.vllm"``; ``docs/vllm.md`` has the rest. Importing this module imports vLLM,
and raises ImportError, naming what is missing, when its interface is not the one this was made for.
"""

from npu_kv_ops.integrations.offload import interface

interface.check_connector()

from npu_kv_ops.integrations.offload.connector import NpuKVOffloadConnector  # noqa: E402
from npu_kv_ops.integrations.offload.worker import NpuKVOffloadWorker  # noqa: E402

__all__ = ["NpuKVOffloadConnector", "NpuKVOffloadWorker"]

"""A pytest plugin for vLLM's own tests of its simple offload: they find our classes in its modules.

docs/vllm.md says how to run them, and what of them is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_global_cleanup: of vLLM's conftest, which is not used")
    from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
    from vllm.v1.simple_kv_offload import manager, metrics, worker

    from npu_kv_ops.integrations.offload.metrics import OffloadPromMetrics, OffloadStats
    from npu_kv_ops.integrations.offload.scheduler import OffloadScheduler
    from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector, NpuKVOffloadWorker

    manager.SimpleCPUOffloadScheduler = OffloadScheduler
    worker.SimpleCPUOffloadWorker = NpuKVOffloadWorker
    simple_cpu_offload_connector.SimpleCPUOffloadConnector = NpuKVOffloadConnector
    metrics.SimpleCPUOffloadStats = OffloadStats
    metrics.SimpleCPUOffloadPromMetrics = OffloadPromMetrics


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog

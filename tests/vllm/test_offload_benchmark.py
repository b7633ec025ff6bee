"""The benchmark of the engine runs, and says what it promises to say. No time is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import ROOT, engine_environment

pytestmark = pytest.mark.timeout(600)

SCRIPT = ROOT / "benchmarks" / "vllm_offload.py"
QUANTILES = {
    f"{what}_us_{part}" for what in ("connector", "scheduler", "worker") for part in ("p50", "p99")
}


def test_reports_both_engines(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--requests", "8"]
    result = subprocess.run(
        [*command, "--json", str(file)],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    off, ours = report["rows"]
    assert (off["engine"], ours["engine"]) == ("off", "npu_kv_ops")
    assert off["loaded_blocks"] == 0
    assert ours["loaded_blocks"] > 0
    assert ours["cached_tokens"] > off["cached_tokens"]
    assert set(ours) >= QUANTILES
    assert ours["connector_us_p50"] > 0
    (target,) = report["targets"]
    assert (target["measured"], target["comparison"]) == (ours["connector_us_p50"], "<=")
    assert target["wanted"] == 100
    assert "connector" in result.stdout

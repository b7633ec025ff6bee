"""Talking to `engine_runner.py`, and what tests ask of an engine's run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import tiny_llama

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 400

Tokens = list[list[list[int]]]
"""By round and prompt."""


def engine_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process with an engine: a CPU machine without torch_npu."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NPU_KV_")}
    folders = (ROOT, HERE, HERE / "without_torch_npu", ROOT / "benchmarks")
    return kept | {
        "PYTHONPATH": ":".join(map(str, folders)),
        "NPU_KV_RUNTIME": "host",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With threads bound to cores that others use as well, OpenMP's barriers take seconds.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **variables,
    }


def connector(
    *, blocks: int = 200, policy: str = "fail", observed: bool = True, **options: Any
) -> dict[str, Any]:
    """Return the ``kv_transfer_config`` with a host pool of ``blocks``."""
    module, name = "npu_kv_ops.integrations.vllm", "NpuKVOffloadConnector"
    if observed:
        module, name = "observed_connector", "ObservedConnector"
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": blocks * tiny_llama.BLOCK_BYTES,
            **options,
        },
    }


@dataclass(frozen=True)
class Report:
    """What an `ObservedConnector` wrote down."""

    lines: Sequence[Mapping[str, Any]]

    def blocks(self, kind: str) -> int:
        """Return how many blocks the jobs of a kind (load, store, failed_load, ...) had."""
        return sum(line.get("blocks", 0) for line in self.of(kind))

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def count(self, kind: str) -> int:
        return len(self.of(kind))

    def unequal(self) -> list[Mapping[str, Any]]:
        """Return the jobs after which host and device did not hold the same bytes."""
        return [line for line in self.lines if line.get("equal") is False]


@dataclass(frozen=True)
class Run:
    """The answer of the runner."""

    answer: Mapping[str, Any]
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "report", Report(self.answer["report"]))

    @property
    def error(self) -> str:
        return str(self.answer.get("error", ""))

    @cached_property
    def tokens(self) -> Tokens:
        return [[output["tokens"] for output in each] for each in self.answer["rounds"]]

    def outputs(self) -> list[Mapping[str, Any]]:
        return [output for each in self.answer["rounds"] for output in each]


class EngineProcess:
    """A process that runs one engine after the other; started when it is first asked."""

    def __init__(self, log: Path, **variables: str) -> None:
        self._log = log
        self._environment = engine_environment(**variables)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._references: dict[str, Run] = {}

    def run(self, scenario: str, **request: Any) -> Run:
        """Run ``scenario``; fails the test when the engine does not start or raises."""
        result = self.attempt(scenario, **request)
        if result.error:
            pytest.fail(f"{result.error}\n--- {self._log}\n{self._tail()}")
        return result

    def attempt(self, scenario: str, **request: Any) -> Run:
        """Run ``scenario``; an exception of the engine is in the result."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"scenario": scenario, **request}) + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            line = ""
        if not line:
            self.stop()
            pytest.fail(f"the engine hangs or has died\n--- {self._log}\n{self._tail()}")
        return Run(json.loads(line))

    def reference(self, **request: Any) -> Run:
        """Run the rounds without a connector, once for all tests that ask for the same."""
        key = json.dumps(request, sort_keys=True)
        if key not in self._references:
            self._references[key] = self.run("rounds", **request)
        return self._references[key]

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "engine_runner.py"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answers = queue.SimpleQueue()
        threading.Thread(
            target=_hand_on, args=(self._process.stdout, self._answers), daemon=True
        ).start()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])


def _hand_on(lines: Any, answers: queue.SimpleQueue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")


def check_offloaded(run: Run, reference: Run) -> None:
    """Check that blocks were stored and loaded, came over whole, and changed no token."""
    assert run.report.blocks("store") > 0
    assert run.report.blocks("load") > 0
    assert run.report.unequal() == []
    assert run.tokens == reference.tokens

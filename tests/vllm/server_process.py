"""`vllm serve` in a process of its own, and requests to it over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_llama
from engine_process import HERE, Report, engine_environment
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny"
START_S = 400  # three processes import vLLM one after the other; other work may slow them down
WAIT_S = 120

OPTIONS = {
    "--dtype": "float32",
    "--block-size": str(tiny_llama.BLOCK_TOKENS),
    "--num-gpu-blocks-override": "20",
    "--max-model-len": "512",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "512",
    # How long requests may take to their end when the server is stopped. By default it kills its
    # processes at once, and no connector gets to know.
    "--shutdown-timeout": "100",
}


class Server:
    """A running server with an `ObservedConnector`."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *,
        connector: Mapping[str, Any],
        fault: Mapping[str, Any],
    ) -> None:
        self._report = folder / "report"
        self._report.touch()
        self._log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(HERE / "serve.py"), "serve", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
        command += ["--enforce-eager", "--kv-transfer-config", json.dumps(connector)]
        command += [word for option in OPTIONS.items() for word in option]
        environment = engine_environment(
            NPU_KV_TEST_REPORT=str(self._report), NPU_KV_TEST_FAULT=json.dumps(fault)
        )
        with self._log.open("w") as log:
            # A session of its own: what a killed server leaves behind can be ended with it.
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._client = openai.OpenAI(
            base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=120
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            time.sleep(0.2)
        pytest.fail(f"the server does not start\n{self.log_tail()}")

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Send a request and yield the tokens as they arrive."""
        chunks = self._client.completions.create(
            model=MODEL,
            prompt=list(prompt),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for chunk in chunks:
            yield list(chunk.choices[0].token_ids or ())  # type: ignore[attr-defined]

    def complete(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [token for tokens in self.stream(prompt, max_tokens) for token in tokens]

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, at_a_time: int
    ) -> list[list[int]]:
        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return the samples of /metrics, by name and by the label ``direction`` (or "")."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            (sample.name, sample.labels.get("direction", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def report(self) -> Report:
        return Report([json.loads(line) for line in self._report.read_text().splitlines()])

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"{what}: not after {WAIT_S} s\n{self.log_tail()}")
            time.sleep(0.02)

    def ask_to_stop(self) -> None:
        """Send the signal that service managers send, and wait until the server has taken it."""
        self._process.send_signal(signal.SIGTERM)
        self.wait_until(lambda: "[shutdown]" in self._log.read_text(errors="replace"), "SIGTERM")

    def exit_code(self) -> int:
        """Wait for the end of the server."""
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server does not stop\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-80:])

    def close(self) -> None:
        """End every process that is left."""
        self._client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

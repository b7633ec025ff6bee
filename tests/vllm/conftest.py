"""Engines of vLLM in processes of their own, beside a pytest process on the simulated NPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_llama
from engine_process import EngineProcess


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama."""
    return tiny_llama.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def _engines(folder: Path, name: str, **variables: str) -> Iterator[EngineProcess]:
    process = EngineProcess(folder / f"{name}.log", **variables)
    yield process
    process.stop()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engines in one process with their workers and the caller."""
    folder = tmp_path_factory.mktemp("engines")
    yield from _engines(folder, "one_process", VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.fixture(scope="session")
def split_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engines whose core and worker have processes of their own."""
    folder = tmp_path_factory.mktemp("split_engines")
    yield from _engines(folder, "own_process", VLLM_ENABLE_V1_MULTIPROCESSING="1")

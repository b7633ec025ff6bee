"""Shared set-up: one process, on the simulated NPU where torch_npu is installed.

The simulator must be active before torch is imported, and test modules import torch, so it is
activated here, when pytest loads this file. ``NPU_KV_RUNTIME=host`` runs the host tests alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from npu_kv_ops import runtime

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent


def _runtime() -> str:
    asked = os.environ.get("NPU_KV_RUNTIME", "auto")
    if asked != "auto":
        return asked
    return "sim" if importlib.util.find_spec("torch_npu") else "host"


RUNTIME = _runtime()
HAS_CANN = runtime.cann_library() is not None
_deselected: list[str] = []

# vLLM has an environment of its own: `make test-vllm`. (Where it is missing, the folder tests/vllm
# itself looks like a package of that name, but one without a file.)
_vllm = importlib.util.find_spec("vllm")
collect_ignore = [] if _vllm is not None and _vllm.origin is not None else ["vllm"]

if RUNTIME == "sim":
    from npu_kv_ops import simulator

    simulator.activate(devices=2)
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
elif RUNTIME == "host":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def _can_run(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    if "no_cann" in fixtures and HAS_CANN:
        return False
    if "sim" in fixtures:
        return RUNTIME == "sim"
    if "npu" in fixtures or item.get_closest_marker("npu"):
        return RUNTIME != "host"
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if not _can_run(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        _deselected.extend(item.nodeid for item in out)
        items[:] = [item for item in items if _can_run(item)]


def pytest_report_header() -> str:
    return f"npu_kv_ops runtime: {RUNTIME}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _deselected:
        return
    reason = "there is CANN, they want the simulator"
    if RUNTIME == "host":
        asked = os.environ.get("NPU_KV_RUNTIME") == "host"
        reason = "NPU_KV_RUNTIME=host" if asked else "torch_npu is not installed"
    terminalreporter.write_line(
        f"{len(_deselected)} tests deselected on the runtime {RUNTIME!r}: {reason}"
    )


@pytest.fixture(scope="session")
def process_runtime() -> str:
    """The runtime that this pytest process is on: ``sim``, ``host`` or ``cann``."""
    return RUNTIME


@pytest.fixture
def no_cann() -> None:
    """For tests of a machine with torch_npu and no CANN: deselected where there is CANN."""


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """The simulator's controls, with counters at zero, no faults, and settings put back after."""
    from npu_kv_ops import simulator

    before = simulator.settings()
    simulator.clear_faults()
    simulator.reset_stats()
    yield simulator
    simulator.clear_faults()
    changed = {key: before[key] for key, now in simulator.settings().items() if now != before[key]}
    if changed:
        simulator.configure(**changed)


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """With NPU_KV_SIM_CHECK_RACES=1 a race fails the test during which it was found."""
    checked = RUNTIME == "sim" and os.environ.get("NPU_KV_SIM_CHECK_RACES") == "1"
    yield
    if checked:
        from npu_kv_ops import simulator

        found = simulator.races()
        if found and not request.node.get_closest_marker("races"):
            pytest.fail(str(simulator.RaceError(found)), pytrace=False)


@pytest.fixture
def npu() -> Iterator[torch.device]:
    """The first NPU, idle before and after the test, which begins on its default stream."""
    runtime.load()
    import torch

    def wait() -> None:
        for index in range(torch.npu.device_count()):
            torch.npu.synchronize(index)

    wait()
    # A test that ended within a capture may have left another one.
    torch.npu.set_stream(torch.npu.default_stream(0))
    yield torch.device("npu:0")
    if RUNTIME == "sim":
        from npu_kv_ops import simulator

        simulator.clear_faults()  # a test that failed may have left a stream stalled
    wait()


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Wait for a condition: torch_npu's release thread takes a moment to let go of things."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


RunScript = Callable[..., subprocess.CompletedProcess[str]]

# Does what npu_kv_ops.pth does, so that a source tree that is not installed behaves the same.
_LAUNCH = """
import runpy, sys
from npu_kv_ops import _startup
_startup.apply()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def run_script(request: pytest.FixtureRequest, tmp_path: Path) -> RunScript:
    """Run a snippet in a fresh Python process and return the completed process.

    ``runtime`` is the value of NPU_KV_RUNTIME (None: unset); ``env`` adds variables, a value of
    None removes one. With ``check`` (the default) a failing snippet fails the test and shows its
    output.
    """

    def run(
        code: str,
        *,
        runtime: str | None = "sim",
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = (),
        timeout: float = 120,
        check: bool = True,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "snippet.py"
        script.write_text(textwrap.dedent(code))
        variables: dict[str, str | None] = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("NPU_KV_") and key != "TORCH_DEVICE_BACKEND_AUTOLOAD"
        }
        variables |= {"NPU_KV_RUNTIME": runtime, "PYTHONPATH": str(ROOT)}
        if runtime == "sim" and not request.node.get_closest_marker("races"):
            variables["NPU_KV_SIM_CHECK_RACES"] = os.environ.get("NPU_KV_SIM_CHECK_RACES")
        variables |= env or {}
        result = subprocess.run(
            [sys.executable, "-c", _LAUNCH, str(script), *args],
            env={key: value for key, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd,
        )
        if check and result.returncode != 0:
            pytest.fail(
                f"exit code {result.returncode}\n--- stdout\n{result.stdout}\n--- stderr\n"
                f"{result.stderr}"
            )
        return result

    return run

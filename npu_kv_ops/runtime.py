"""Which runtime this process uses, and loading the libraries that fit it.

There are three:

``cann``
    torch_npu on a real NPU.
``sim``
    torch_npu on the simulated runtime. Only when asked for: ``npu_kv_ops.simulator.activate()``,
    ``NPU_KV_RUNTIME=sim`` or ``python -m npu_kv_ops.simulator``.
``host``
    CPU torch alone; copies from host memory to host memory.

``NPU_KV_RUNTIME`` chooses one of them. ``auto``, the default, takes ``cann`` where torch_npu and
CANN are installed and ``host`` where torch_npu is not.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

__all__ = ["BuildInfo", "Runtime", "build_info", "cann_library", "current", "load"]

Runtime = Literal["cann", "sim", "host"]

_PACKAGE = Path(__file__).resolve().parent
_CORE = _PACKAGE / "lib" / "libnpu_kv_core.so"
_NPU = _PACKAGE / "lib" / "libnpu_kv_npu.so"
_SIMULATOR = _PACKAGE / "lib" / "simulator"

_REBUILD = (
    "in the source tree run `pip install --no-build-isolation --no-deps --force-reinstall .` "
    "(add -e for an editable install) with the Python that will run it"
)
_CHOICES = (
    "on a machine with an NPU run CANN's set_env.sh; for the simulated NPU set NPU_KV_RUNTIME=sim "
    "or call npu_kv_ops.simulator.activate() before torch is imported; for CPU tensors alone set "
    "NPU_KV_RUNTIME=host"
)
_NO_RUNTIME = (
    "torch_npu is installed but CANN is not (no libascendcl.so in LD_LIBRARY_PATH, the linker's "
    "cache or ASCEND_HOME_PATH), so `import torch` would fail with 'Failed to load the backend "
    f"extension: torch_npu'. Choose one: {_CHOICES}"
)

_lock = threading.RLock()
_core_loaded = False
_npu_loaded = False
_loaded: Runtime | None = None


@dataclass(frozen=True)
class BuildInfo:
    """What the installed libraries were built against; None where a library is missing."""

    torch: str | None
    torch_npu: str | None


def build_info() -> BuildInfo:
    """Return the versions of torch and torch_npu that the installed libraries were built against.

    Reads two small files and loads nothing.
    """
    return BuildInfo(_built_against(_CORE).get("torch"), _built_against(_NPU).get("torch_npu"))


def cann_library() -> str | None:
    """Return the path of CANN's ``libascendcl.so`` as this process would load it, or None.

    Nothing is loaded. The simulated library never counts. The folders of ``LD_LIBRARY_PATH`` are
    searched first, then the linker's cache, then ``ASCEND_HOME_PATH``; a library that is only in
    the last can not be loaded before CANN's ``set_env.sh`` was run.
    """
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for folder in folders:
        if folder and (found := _library_in(Path(folder))):
            return found
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # ldconfig is not on every user's PATH, and is missing where there is no linker cache.
        cache = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=10, check=True
        )
        for line in cache.stdout.splitlines():
            name, _, path = line.strip().partition(" => ")
            if name.split(" ")[0] == "libascendcl.so" and (found := _library_in(Path(path).parent)):
                return found
    home = os.environ.get("ASCEND_HOME_PATH")
    return _library_in(Path(home, "lib64")) if home else None


def current() -> Runtime:
    """Return the runtime of this process; decide on it as :func:`load` would, without side effects.

    Raises:
        ValueError: ``NPU_KV_RUNTIME`` has another value than ``cann``, ``sim``, ``host``, ``auto``.
        RuntimeError: no runtime fits: torch_npu is installed, CANN is not, and neither ``sim`` nor
            ``host`` was asked for; or the simulator is active although ``NPU_KV_RUNTIME`` names
            another runtime.
    """
    asked = os.environ.get("NPU_KV_RUNTIME") or "auto"
    allowed = (*get_args(Runtime), "auto")
    if asked not in allowed:
        raise ValueError(f"NPU_KV_RUNTIME={asked!r}: allowed are {', '.join(allowed)}")
    if _simulator_active():
        if asked not in ("sim", "auto"):
            raise RuntimeError(f"the simulator is active, but NPU_KV_RUNTIME={asked}")
        return "sim"
    if asked != "auto":
        return cast("Runtime", asked)
    if "torch" in sys.modules:
        return "cann" if "torch_npu" in sys.modules else "host"
    if not _autoload_enabled() or importlib.util.find_spec("torch_npu") is None:
        return "host"
    if cann_library() is None:
        raise RuntimeError(_NO_RUNTIME)
    return "cann"


def load() -> Runtime:
    """Import torch for this process's runtime, load the libraries, and return the runtime.

    Loads the core library and, when torch_npu is in use, the NPU library. Idempotent and safe from
    several threads. A process that runs on ``host`` and imports torch_npu later gets the NPU
    library at the next call, unless ``NPU_KV_RUNTIME=host``.

    Raises:
        ImportError: torch or torch_npu can not be imported, a library is missing, or it was built
            for another version; the message says how to build it.
        ValueError, RuntimeError: as :func:`current`.
    """
    global _core_loaded, _npu_loaded, _loaded
    if _loaded is not None and (_loaded != "host" or "torch_npu" not in sys.modules):
        return _loaded
    with _lock:
        runtime = current()
        _require(_CORE, "it was not built")
        if runtime != "host":
            _require_torch_npu(runtime)
        _import_torch(runtime)
        if not _core_loaded:
            _check_version(_CORE, "torch")
            _load_library(_CORE)
            _import_bindings()
            _core_loaded = True
        if runtime != "host" and not _npu_loaded:
            _require(_NPU, "torch_npu was not installed when npu_kv_ops was built")
            _check_version(_NPU, "torch")
            _check_version(_NPU, "torch_npu")
            _load_library(_NPU)
            _npu_loaded = True
        _loaded = runtime
        return runtime


def _autoload_enabled() -> bool:
    # torch's own rule: only the string 1 means on.
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def _simulator_active() -> bool:
    # Only its own module can have activated it, so nothing is imported just to ask.
    simulator = sys.modules.get("npu_kv_ops.simulator")
    return simulator is not None and bool(simulator.is_active())


def _library_in(folder: Path) -> str | None:
    library = folder / "libascendcl.so"
    if library.is_file() and folder.resolve() != _SIMULATOR:
        return str(library)
    return None


def _built_against(library: Path) -> dict[str, str]:
    try:
        text = library.with_name(library.name[3:]).with_suffix(".json").read_text()
    except FileNotFoundError:
        return {}
    return cast("dict[str, str]", json.loads(text))


def _require(library: Path, reason: str) -> None:
    if not library.is_file():
        raise ImportError(f"{library} is missing: {reason}. To build it, {_REBUILD}")


def _require_torch_npu(runtime: Runtime) -> None:
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        raise ImportError(
            f"the runtime {runtime!r} needs torch_npu, which is not installed: "
            "pip install 'npu_kv_ops[npu]', then rebuild; or set NPU_KV_RUNTIME=host"
        )


def _import_torch(runtime: Runtime) -> None:
    if runtime == "sim" and not _simulator_active():
        from npu_kv_ops import simulator

        simulator.activate()
    if runtime == "host":
        if os.environ.get("NPU_KV_RUNTIME") == "host" and "torch" not in sys.modules:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        importlib.import_module("torch")
        return
    try:
        # torch first: it then loads torch_npu itself, which otherwise leaves autoload switched off
        # in the environment of child processes.
        importlib.import_module("torch")
        importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        if runtime == "sim":
            advice = "The simulated runtime may not fit this torch_npu: see `npu-kv doctor`"
        else:
            advice = f"CANN found: {cann_library() or 'none'}. Choose one: {_CHOICES}"
        raise ImportError(
            f"torch_npu can not be imported on the runtime {runtime!r}: "
            f"{error.__cause__ or error}. {advice}"
        ) from error


def _public(version: str) -> str:
    # 2.13.0+cpu and 2.13.0+cu130 have the same C++ interface in the libraries that are linked here.
    return version.partition("+")[0]


def _check_version(library: Path, package: str) -> None:
    built = _built_against(library).get(package)
    running = str(sys.modules[package].__version__)
    if built is None or _public(built) != _public(running):
        raise ImportError(
            f"{library.name} was built for {package} {built or '(unknown)'}, this process has "
            f"{package} {running}. To rebuild it, {_REBUILD}"
        )


def _load_library(library: Path) -> None:
    import torch

    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise _unloadable(library, error) from error


def _import_bindings() -> None:
    try:
        importlib.import_module("npu_kv_ops._C")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"npu_kv_ops has no bindings for Python {sys.version_info[0]}.{sys.version_info[1]}. "
            f"To build them, {_REBUILD}"
        ) from error
    except ImportError as error:
        raise _unloadable(_PACKAGE / "_C", error) from error


def _unloadable(library: Path, error: Exception) -> ImportError:
    built = ", ".join(f"{name} {version}" for name, version in _built_against(_CORE).items())
    return ImportError(
        f"{library.name} can not be loaded: {error.__cause__ or error}. It was built for {built}; "
        f"an undefined symbol means that another one is running. To rebuild it, {_REBUILD}"
    )

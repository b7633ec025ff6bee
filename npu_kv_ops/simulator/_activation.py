"""Loading the simulated libraries into this process, once and before torch_npu."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_kv_ops.simulator._elf import hide_symbols
from npu_kv_ops.simulator._quiet import silence_torch_npu

__all__ = ["activate", "is_active", "library"]

FOLDER = Path(__file__).resolve().parent.parent / "lib" / "simulator"

# Each after those it needs. torch_npu finds them by SONAME, wherever they were loaded from.
_COMPANIONS = (
    "libacl_op_compiler.so",
    "libhccl.so",
    "libgraph.so",
    "libge_runner.so",
    "libfmk_parser.so",
    "libacl_tdt_channel.so",
    "libascend_protobuf.so",
)
_RUNTIME = "libascendcl.so"
# Links torch, so the runtime opens it once torch is in the process.
_KERNELS = FOLDER.parent / "libnpu_kv_sim_kernels.so"

_PREFIX = "NPU_KV_SIM_"
_NOT_SETTINGS = {"QUIET", "LOG", "WITHOUT", "CHECK_RACES"}

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_loaded_without: frozenset[str] = frozenset()
_active = False


def activate(*, devices: int | None = None, without: Sequence[str] = ()) -> None:
    """Make this process use the simulated NPU. Call it before ``import torch``.

    Settings are taken from the environment: ``NPU_KV_SIM_<SETTING>``, the setting's name in upper
    case. ``NPU_KV_SIM_CHECK_RACES=1`` checks for races until the process ends. One line on stderr
    says that the simulator is in use; ``NPU_KV_SIM_QUIET=1`` silences it.
    A second call changes the number of devices when one is given, and nothing else.

    Args:
        devices: how many NPUs there are; default ``NPU_KV_SIM_DEVICES``, else 1.
        without: names of runtime functions that are to be missing, as in an older CANN. Default
            ``NPU_KV_SIM_WITHOUT``, names separated by commas.

    Raises:
        RuntimeError: torch_npu has been imported or the real CANN runtime is loaded, both without
            the simulator; or the simulator was loaded with another ``without``.
        ValueError: an environment variable names no setting or has no fitting value; ``without``
            names a function that the simulated runtime does not have.
        OSError: the simulated libraries are missing or cannot be loaded.
    """
    global _active, _loaded, _loaded_without
    with _lock:
        missing = frozenset(without or _names_in(os.environ.get(_PREFIX + "WITHOUT", "")))
        if _loaded is None:
            _refuse_if_too_late()
            _loaded = _load_runtime(sorted(missing))
            _loaded_without = missing
        elif without and missing != _loaded_without:
            raise RuntimeError(
                f"the simulator was loaded with without={sorted(_loaded_without)}; for "
                f"without={sorted(missing)} start a new process"
            )
        if not _active:
            _apply_settings(_loaded, _settings_from_environment(_loaded, os.environ))
        if devices is not None:
            _apply_settings(_loaded, {"devices": devices})
        if not _active:
            for name in _COMPANIONS:
                ctypes.CDLL(str(FOLDER / name), mode=ctypes.RTLD_GLOBAL)
            _loaded.npu_sim_set_operator_library(str(_KERNELS).encode())
            silence_torch_npu()
            _active = True
            _announce(_loaded)
            if os.environ.get(_PREFIX + "CHECK_RACES") == "1":
                from npu_kv_ops.simulator import _races

                _races.check_from_now_on()


def is_active() -> bool:
    """Whether this process uses the simulated NPU."""
    return _active


def library() -> ctypes.CDLL:
    """Return the simulated ``libascendcl.so``, for tests that call the runtime directly.

    Raises:
        RuntimeError: the simulator is not active.
    """
    if not _active or _loaded is None:
        raise RuntimeError(
            "the simulator is not active: call npu_kv_ops.simulator.activate() first"
        )
    return _loaded


def last_error(runtime: ctypes.CDLL) -> str:
    """Return the message of this thread's last failing ``npu_sim_*`` call."""
    runtime.npu_sim_error.restype = ctypes.c_char_p
    return bytes(runtime.npu_sim_error()).decode()


def take_text(function: Any, *arguments: Any) -> str:
    """Return the text that an ``npu_sim_*`` function gives away, and free it."""
    function.restype = ctypes.c_void_p
    address = function(*arguments)
    if not address:
        raise MemoryError("the simulator has no memory for its answer")
    try:
        return ctypes.string_at(address).decode()
    finally:
        library().npu_sim_free(ctypes.c_void_p(address))


def setting_names(runtime: ctypes.CDLL) -> list[str]:
    """Return the names of all settings."""
    runtime.npu_sim_setting_names.restype = ctypes.c_char_p
    return bytes(runtime.npu_sim_setting_names()).decode().split()


def set_setting(runtime: ctypes.CDLL, name: str, value: float) -> None:
    """Change one setting; ValueError when there is none of that name or the value is too small."""
    names = setting_names(runtime)
    if name not in names:
        raise ValueError(f"no setting {name!r}; the settings are {', '.join(names)}")
    number = int(value)
    if number != value:
        raise ValueError(f"{name}={value!r}: settings are whole numbers")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}={value!r} does not fit in 64 bits")
    if runtime.npu_sim_set(name.encode(), ctypes.c_int64(number)) != 0:
        raise ValueError(last_error(runtime))


def _names_in(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _apply_settings(runtime: ctypes.CDLL, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        set_setting(runtime, name, value)


def _refuse_if_too_late() -> None:
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu is imported already (`import torch` imports it): activate the simulator "
            "first, or start with `python -m npu_kv_ops.simulator script.py`"
        )
    with contextlib.suppress(OSError):
        # Succeeds only when a library of that SONAME is in the process already.
        ctypes.CDLL(_RUNTIME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        raise RuntimeError(f"this process has loaded another {_RUNTIME} already")


def _load_runtime(without: Sequence[str]) -> ctypes.CDLL:
    path = FOLDER / _RUNTIME
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: npu_kv_ops was built without the simulator")
    if not without:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    # The copy lives in memory alone. It keeps its SONAME, so everything loaded later binds to it.
    descriptor = os.memfd_create(_RUNTIME, os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as copy:
            copy.write(hide_symbols(path.read_bytes(), without))
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(descriptor)


def _settings_from_environment(
    runtime: ctypes.CDLL, environment: Mapping[str, str]
) -> dict[str, int]:
    names = setting_names(runtime)
    values = {}
    for variable, text in environment.items():
        key = variable.removeprefix(_PREFIX)
        if key == variable or key in _NOT_SETTINGS:
            continue
        if key.lower() not in names:
            known = ", ".join(_PREFIX + name.upper() for name in names)
            raise ValueError(f"{variable} is no setting of the simulator; there are {known}")
        try:
            values[key.lower()] = int(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r}: settings are whole numbers") from None
    return values


def _announce(runtime: ctypes.CDLL) -> None:
    if os.environ.get(_PREFIX + "QUIET") == "1":
        return
    devices = ctypes.c_int64()
    runtime.npu_sim_get(b"devices", ctypes.byref(devices))
    plural = "device" if devices.value == 1 else "devices"
    print(
        f"npu_kv_ops: using the simulated NPU ({devices.value} {plural}, on the CPU)",
        file=sys.stderr,
        flush=True,
    )

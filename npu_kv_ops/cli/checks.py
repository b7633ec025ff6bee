"""What `npu-kv doctor` looks at before torch is imported, and the form of every result."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass
from typing import Literal

from npu_kv_ops import runtime

from . import runtime_choice

Status = Literal["ok", "warning", "failed", "absent"]

_REBUILD = "rebuild npu_kv_ops: pip install --no-build-isolation --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Result:
    """What one check found.

    Attributes:
        status: `ok`; `warning`: works, with a drawback; `failed`; `absent`: nothing to try here.
        essential: whether `failed` means that npu_kv_ops cannot be used.
        advice: what to do, unless the status is `ok`.
    """

    name: str
    status: Status
    essential: bool
    detail: str
    advice: str = ""


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _public(version: str) -> str:
    return version.partition("+")[0]


def _torch_wanted_by_torch_npu() -> str | None:
    """The torch that the installed torch_npu asks for, if it names one exactly."""
    for requirement in importlib.metadata.requires("torch_npu") or ():
        match = re.match(r"torch\s*\(?==\s*(\d+(?:\.\d+)*)", requirement)
        if match:
            return match.group(1)
    version = re.match(r"\d+\.\d+\.\d+", installed_version("torch_npu") or "")
    return version.group(0) if version else None


def check_python() -> Result:
    """The interpreter; an unsupported one cannot import this package."""
    text = f"{platform.python_version()} on {platform.machine()}, {platform.system()}"
    return Result("Python", "ok", True, text)


def check_torch() -> Result:
    """The torch that is installed, and the one the libraries were built for."""
    name = "torch"
    found, built = installed_version("torch"), runtime.build_info().torch
    if found is None:
        return Result(name, "failed", True, "not installed", "pip install torch")
    if built is None:
        detail = f"{found}; the core library of npu_kv_ops is missing"
        return Result(name, "failed", True, detail, _REBUILD)
    if _public(found) != _public(built):
        detail = f"{found}, but npu_kv_ops was built for {built}"
        return Result(name, "failed", True, detail, _REBUILD)
    return Result(name, "ok", True, f"{found}, as npu_kv_ops was built for")


def check_torch_npu(decided: runtime.Runtime | None) -> Result:
    """The torch_npu that is installed, whether it fits torch, and the one the library is for."""
    name, essential = "torch_npu", decided in ("cann", "sim")
    found, built = installed_version("torch_npu"), runtime.build_info().torch_npu
    if found is None:
        return Result(
            name,
            "failed" if essential else "absent",
            essential,
            "not installed: only host memory can be used",
            "for NPUs, real or simulated: pip install 'npu_kv_ops[npu]', then " + _REBUILD,
        )
    wanted, torch = _torch_wanted_by_torch_npu(), installed_version("torch")
    if wanted and torch and _public(torch) != wanted:
        return Result(
            name,
            "failed",
            essential,
            f"{found} is for torch {wanted}, but torch {torch} is installed",
            f"pip install torch=={wanted}, or the torch_npu for torch {_public(torch)}; "
            f"then {_REBUILD}",
        )
    if built is None:
        detail = f"{found}; npu_kv_ops was built without it"
        return Result(name, "failed", essential, detail, _REBUILD)
    if _public(found) != _public(built):
        detail = f"{found}, but npu_kv_ops was built for {built}"
        return Result(name, "failed", essential, detail, _REBUILD)
    return Result(name, "ok", essential, f"{found}, as npu_kv_ops was built for")


def check_cann(decided: runtime.Runtime | None) -> Result:
    """Whether CANN is there."""
    path = runtime.cann_library()
    if path is not None:
        used = "" if decided == "cann" else f"; not used: the runtime is {decided}"
        return Result("CANN", "ok", False, path + used)
    simulated = "; the SIMULATED runtime stands in for it" if decided == "sim" else ""
    return Result(
        "CANN",
        "absent",
        False,
        "not found" + simulated,
        "on a machine with an NPU install CANN and run its set_env.sh",
    )


def check_runtime(
    option: runtime_choice.RuntimeOption,
) -> tuple[runtime.Runtime | None, Result]:
    """Which runtime `option` leads to."""
    try:
        decided = runtime_choice.decide(option)
    except RuntimeError as error:
        return None, Result("runtime", "failed", True, str(error), "choose another with --runtime")
    detail = f"{decided}: {runtime_choice.DESCRIPTIONS[decided]}"
    if decided == "cann":
        return decided, Result("runtime", "ok", True, detail)
    advice = "on a machine with an NPU run CANN's set_env.sh first"
    return decided, Result("runtime", "warning", True, detail, advice)

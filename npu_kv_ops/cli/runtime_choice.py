"""Which runtime a command uses. Imports no torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Literal, cast, get_args

from npu_kv_ops import runtime, simulator

RuntimeOption = Literal["auto", "cann", "sim", "host"]

DESCRIPTIONS = {
    "cann": "a real NPU",
    "sim": "the SIMULATED NPU (no real device is used)",
    "host": "host memory alone (the device pool is a CPU tensor, no NPU is used)",
}


class RuntimeChoiceError(RuntimeError):
    """The runtime asked for cannot be used here."""


def add_runtime_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--runtime`."""
    parser.add_argument(
        "--runtime",
        choices=get_args(RuntimeOption),
        default="auto",
        help="auto (default): a real NPU where CANN is found, else the simulated NPU where "
        "torch_npu is installed, else host memory alone",
    )


def decide(option: RuntimeOption) -> runtime.Runtime:
    """The runtime that `option` leads to; `auto` gives way to `NPU_KV_RUNTIME`. Loads nothing.

    Raises:
        RuntimeChoiceError: it cannot be used here; says why and what to do.
    """
    if option == "auto":
        asked = os.environ.get("NPU_KV_RUNTIME") or "auto"
        if asked not in get_args(RuntimeOption):
            allowed = ", ".join(get_args(RuntimeOption))
            raise RuntimeChoiceError(f"NPU_KV_RUNTIME is {asked!r}, allowed are {allowed}")
        option = cast(RuntimeOption, asked)
    if option == "cann" and runtime.cann_library() is None:
        raise RuntimeChoiceError(
            "no CANN was found: run its set_env.sh first, or choose the runtime sim or host"
        )
    if option != "auto":
        return option
    if simulator.is_active():
        return "sim"
    if "torch" in sys.modules:
        return "cann" if "torch_npu" in sys.modules else "host"
    if importlib.util.find_spec("torch_npu") is None:
        return "host"
    return "sim" if runtime.cann_library() is None else "cann"


def choose(option: RuntimeOption) -> runtime.Runtime:
    """Settles the runtime of this process, activates the simulator if it is that, and loads it.

    Raises:
        RuntimeChoiceError: it cannot be used here; says why and what to do.
    """
    decided = decide(option)
    os.environ["NPU_KV_RUNTIME"] = decided
    try:
        if decided == "sim":
            simulator.activate()
        return runtime.load()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise RuntimeChoiceError(str(error)) from error

"""``python -m npu_kv_ops.simulator``: run a program on the simulated NPU.

The program is named as for ``python`` itself: a script, ``-m module`` or ``-c code``, then its
arguments.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from collections.abc import Sequence

from npu_kv_ops import simulator


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m npu_kv_ops.simulator",
        usage="%(prog)s [--devices N] [--without FUNCTION]... script.py | -m MODULE | -c CODE ...",
        description="Run a program on the simulated NPU.",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="how many NPUs there are")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FUNCTION",
        help="a runtime function that is to be missing; may be given several times",
    )
    own, program = _split(arguments)
    options = parser.parse_args(own)
    if not program or program in (["-m"], ["-c"]):
        parser.error("which program? Name a script, -m MODULE or -c CODE")
    options.program = program
    return options


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our own options from the program, which starts at the first other word."""
    own: list[str] = []
    rest = list(arguments)
    while rest and (
        rest[0] in ("-h", "--help") or rest[0].partition("=")[0] in ("--devices", "--without")
    ):
        own.append(rest.pop(0))
        if own[-1] in ("--devices", "--without") and rest:
            own.append(rest.pop(0))
    return own, rest


def _run(program: list[str]) -> None:
    kind = program[0]
    if kind == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *program[2:]]
        sys.path[0] = ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(program[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Activate the simulator, for child processes too, and run the program."""
    options = _parse(sys.argv[1:])
    try:
        simulator.activate(devices=options.devices, without=options.without)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"npu_kv_ops: {error}")
    os.environ["NPU_KV_RUNTIME"] = "sim"
    if options.devices is not None:
        os.environ["NPU_KV_SIM_DEVICES"] = str(options.devices)
    if options.without:
        os.environ["NPU_KV_SIM_WITHOUT"] = ",".join(options.without)
    _run(options.program)


if __name__ == "__main__":
    main()

"""The command `npu-kv`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from npu_kv_ops._version import __version__

from . import doctor, replay

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE", "main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npu-kv",
        description="Copies of KV-cache blocks between Ascend NPUs and host memory: checks and "
        "experiments. Exit codes: 0 all well, 1 something failed or is wrong, 2 wrong usage or "
        "input, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"npu_kv_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    replay.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `npu-kv` with `argv` (default: the process's arguments) and returns its exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("npu-kv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; leave nothing for the interpreter to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED

"""`npu-kv doctor`: what works here, each thing really tried, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from npu_kv_ops import runtime
from npu_kv_ops._version import __version__

from . import checks, device_checks, runtime_choice
from .checks import Result

_COMMAND = (sys.executable, "-m", device_checks.__name__)
_SECONDS_PER_CHECK = 90.0
_WIDTH = 160
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("note", "yellow"),
    "failed": ("FAILED", "bold red"),
    "absent": ("-", "dim"),
}


def add_parser(commands: Any) -> None:
    """Adds the command to `npu-kv`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check what works on this machine, and say what to do about the rest",
        description="Tries everything npu_kv_ops needs. Exit code 1 if something essential fails.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    runtime_choice.add_runtime_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: 0, or 1 if something essential fails."""
    decided, results = diagnose(arguments.runtime)
    broken = [result for result in results if result.essential and result.status == "failed"]
    if arguments.json:
        print(
            json.dumps(
                {
                    "ok": not broken,
                    "version": __version__,
                    "runtime": decided,
                    "simulated": decided == "sim",
                    "checks": [asdict(result) for result in results],
                },
                indent=2,
            )
        )
    else:
        _print(results, broken)
    return 1 if broken else 0


def diagnose(
    option: runtime_choice.RuntimeOption,
) -> tuple[runtime.Runtime | None, list[Result]]:
    """All checks on the runtime that `option` leads to, and that runtime."""
    decided, chosen = checks.check_runtime(option)
    results = [
        checks.check_python(),
        checks.check_torch(),
        checks.check_torch_npu(decided),
        checks.check_cann(decided),
        chosen,
    ]
    if decided is None:
        return None, results
    names = list(device_checks.HOST_CHECKS)
    if decided != "host":
        names += device_checks.DEVICE_CHECKS
    results += _try(decided, names)
    if decided == "host":
        results += [
            Result(name, "absent", False, "no NPU is used", "install torch_npu to try it")
            for name in device_checks.DEVICE_CHECKS
        ]
    return decided, results


def _try(decided: runtime.Runtime, names: Sequence[str]) -> Iterator[Result]:
    """Results of the checks `names`, from as many processes as it takes."""
    left = list(names)
    first = True
    while True:
        current, ended_well = device_checks.LOAD, False
        with _Child(decided, left) as child:
            for record in child.records():
                if "begin" in record:
                    current = record["begin"]
                    continue
                result = Result(**record)
                if result.name in left:
                    left.remove(result.name)
                if result.name != device_checks.LOAD or first:
                    yield result
                if result.name == device_checks.LOAD and result.status == "failed":
                    yield from _untried(left)
                    return
            ended_well = child.ended_well()
            story = child.story()
        first = False
        if ended_well or not left:
            return
        yield Result(
            current,
            "failed",
            _essential(current),
            story,
            "see the end of the output above and the logs in ~/ascend/log",
        )
        if current == device_checks.LOAD:
            yield from _untried(left)
            return
        left.remove(current)
        if not left:
            return


def _essential(name: str) -> bool:
    every = device_checks.HOST_CHECKS | device_checks.DEVICE_CHECKS
    return every[name][1] if name in every else True


def _untried(names: Sequence[str]) -> Iterator[Result]:
    for name in names:
        yield Result(name, "absent", False, "not tried", "first solve what failed above")


class _Child:
    """A process that runs checks and reports them through a pipe."""

    def __init__(self, decided: runtime.Runtime, names: Sequence[str]) -> None:
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        command = [*_COMMAND, "--runtime", decided]
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(write), *names],
                pass_fds=(write,),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "NPU_KV_RUNTIME": decided},
            )
        finally:
            os.close(write)
        self._hung = False

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._output.close()

    def records(self) -> Iterator[dict[str, Any]]:
        """What the process reports, until it ends or says nothing for too long."""
        os.set_blocking(self._pipe.fileno(), False)
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            deadline = time.monotonic() + _SECONDS_PER_CHECK
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._hung = True
                    self._process.kill()
                    return
                data = os.read(self._pipe.fileno(), 1 << 16)
                if not data:
                    return
                deadline = time.monotonic() + _SECONDS_PER_CHECK
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    def ended_well(self) -> bool:
        """Whether the process came to its end."""
        try:
            return self._process.wait(timeout=_SECONDS_PER_CHECK) == 0 and not self._hung
        except subprocess.TimeoutExpired:
            self._hung = True
            return False

    def story(self) -> str:
        """How the process ended, with the last line it printed."""
        if self._hung:
            return f"hung: nothing for {_SECONDS_PER_CHECK:.0f} s"
        code = self._process.returncode
        if code is not None and code < 0:
            ending = f"crashed with {signal.Signals(-code).name}"
        else:
            ending = f"ended with exit code {code}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{ending}: {lines[-1]}" if lines else ending


def _print(results: Sequence[Result], broken: Sequence[Result]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # nobody's window limits it, and searching is easier
    table = Table(show_edge=False, box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for result in results:
        mark, style = _MARKS[result.status]
        detail = Text(result.detail)
        if result.advice and result.status != "ok":
            detail.append(f"\n-> {result.advice}", style="italic")
        table.add_row(result.name, Text(mark, style=style), detail)
    console.print(table)
    if broken:
        names = ", ".join(result.name for result in broken)
        console.print(f"npu_kv_ops cannot be used: {names}", style="bold red", highlight=False)
    else:
        failed = [result.name for result in results if result.status == "failed"]
        also = f"; what does not work is optional: {', '.join(failed)}" if failed else ""
        console.print(f"npu_kv_ops can be used{also}", style="bold green", highlight=False)

"""What every benchmark shares: interleaved rounds, medians, targets, the table, JSON, exit codes.

A benchmark hands in contestants. A contestant does its work once, times itself and returns its
times by name, in seconds, so that one run can tell several (until the call returned, until all was
done). All contestants get their turn in every round, in an order that changes from round to round:
whatever else the machine does then hits all of them alike. The median over the rounds is what
counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Times = Mapping[str, float]
Contestant = Callable[[], Times]

_COMPARISONS = {">=": operator.ge, "<=": operator.le}


def measure(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    warmup: int = 2,
    repeat: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Give every contestant a turn per round; return its times, by contestant and name of the time.

    In its turn a contestant runs ``repeat`` times and the last time counts. With more than one the
    earlier ones bring its data back into the caches, from where the others drove it; what the first
    one took is kept too, under the name of the time with `` cold`` added. ``settle`` runs, untimed,
    before each run. The rounds of ``warmup`` are not kept. Garbage is collected between rounds and
    not while a contestant runs.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    was_enabled = gc.isenabled()
    try:
        for number in range(warmup + rounds):
            shuffle(order)
            gc.collect()
            gc.disable()
            for name in order:
                times = []
                for _ in range(repeat):
                    settle()
                    times.append(contestants[name]())
                kept = dict(times[-1])
                if repeat > 1:
                    kept |= {f"{what} cold": seconds for what, seconds in times[0].items()}
                for what, seconds in kept.items():
                    if number >= warmup:
                        samples[name].setdefault(what, []).append(seconds)
            gc.enable()
    finally:
        if was_enabled:
            gc.enable()
        else:
            gc.disable()
    return samples


def medians(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each list of :func:`measure`."""
    return {
        name: {what: statistics.median(values) for what, values in times.items()}
        for name, times in samples.items()
    }


@dataclass(frozen=True)
class Target:
    """A number to reach: ``measured`` must stand in ``comparison`` to ``wanted``."""

    name: str
    measured: float
    comparison: Literal[">=", "<="]
    wanted: float

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return bool(_COMPARISONS[self.comparison](self.measured, self.wanted))

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return (
            f"{verdict}: {self.name}: {self.measured:.2f}, wanted {self.comparison} {self.wanted:g}"
        )


@dataclass
class Report:
    """Everything a benchmark says: ``lines`` and ``notes`` for people, ``rows`` for programs."""

    benchmark: str
    title: str
    columns: Sequence[str]
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()
    lines: list[Sequence[str]] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def line(self, *cells: str) -> None:
        """Add a line to the table."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a line of {len(cells)} cells for {len(self.columns)} columns")
        self.lines.append(cells)

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` writes."""
        return {
            "benchmark": self.benchmark,
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": list(self.rows),
            "targets": [asdict(target) | {"met": target.met} for target in self.targets],
        }

    def print(self) -> None:
        """Print the machine, the table, the notes and the targets."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for line in self.lines:
            table.add_row(*line)
        # A pipe has no width of its own, and a wrapped table is hard to read in a log.
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)
        console.print(f"Machine: {describe_machine(machine())}", markup=False, soft_wrap=True)
        for target in self.targets:
            console.print(str(target), markup=False, soft_wrap=True)


def argument_parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; ``rounds`` is a default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--rounds", type=positive, default=rounds, help="rounds that are measured")
    return parser


def positive(text: str) -> int:
    """Read a positive integer from the command line."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def finish(report: Report, options: argparse.Namespace) -> int:
    """Print the report, write the JSON file if asked for, and return the exit code."""
    report.print()
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    missed = [target for target in report.targets if not target.met]
    if not (options.check and missed):
        return 0
    for target in missed:
        print(f"{report.benchmark}: {target}", file=sys.stderr)
    return 1


def machine() -> dict[str, Any]:
    """Return what the numbers depend on besides the code: processor, kernel and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torch_npu", "numpy")},
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    """Return the facts of :func:`machine` as one line."""
    versions = ", ".join(
        f"{name} {facts[name]}" for name in ("python", "torch", "torch_npu", "numpy") if facts[name]
    )
    return f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, {versions}"


def _cpu_model() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    # Virtual machines often give a name that says little.
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

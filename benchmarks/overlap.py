"""What the graph passes make of a model that moves blocks layer by layer, on the virtual clock.

Runs on the simulated NPU, whose clock is counted and not taken: every number is exact and the same
on every machine. A graph of npugraph_ex with 32 layers, each of which loads its blocks, computes
for a set time, and stores blocks: one of these, or both. A transfer takes 0.25, 1 or 4 times as
long as the computation of a layer.

without    makespan of a replay as the model is written: the sum of everything
with       makespan behind the passes; at most 1.05 of the longest of computation, loads and
           stores, and one layer
callbacks  how often a stream calls the host
calls      calls of the runtime that queue work during the replay
copies     copies given to the runtime; with keys beside values a pair of them is one

The results are compared with those of the same model on the CPU, and the race checker watches one
replay each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import Report, Target, argument_parser, finish, positive

from npu_kv_ops import simulator

simulator.activate()

import torch  # noqa: E402

from npu_kv_ops import ops  # noqa: E402
from npu_kv_ops.testing.layers import LayeredModel  # noqa: E402

if TYPE_CHECKING:
    from npu_kv_ops.simulator import TaskRecord

LOAD, STORE = ("load",), ("store",)
BOTH = (*LOAD, *STORE)
BESIDE = "load keys, values"
MODELS = {"load": (LOAD, 1), "store": (STORE, 1), "load and store": (BOTH, 1), BESIDE: (LOAD, 2)}
RATIOS = (0.25, 1.0, 4.0)
PASSES = ("reinplace", "merge", "overlap")
WITHOUT, WITH = "without", "with"
QUEUES_WORK = ("Memcpy", "RecordEvent", "StreamWait", "Value", "Execute")
AT_ONCE = 10**18  # bytes a second
REPLAYS = 3


@dataclass(frozen=True)
class Shape:
    """Of a model, and what its layers take on the virtual clock, in ns."""

    layers: int
    pairs: int
    payload: int  # float32 elements

    def transfer_ns(self, halves: int) -> float:
        """Of the blocks of a layer, one way: as many copies as there are payloads."""
        settings = simulator.settings()
        seconds = self.payload * 4 / settings["h2d_bytes_per_second"]
        return halves * self.pairs * (settings["copy_ns"] + seconds * 1e9)


@dataclass(frozen=True)
class Run:
    """A replay."""

    tasks: Sequence[TaskRecord]
    calls: int
    copies: int

    @property
    def makespan_ns(self) -> int:
        return max(one.end_ns for one in self.tasks) - min(one.start_ns for one in self.tasks)

    @property
    def callbacks(self) -> int:
        return sum(one.kind == "host_function" for one in self.tasks)


def replays(
    kinds: Sequence[str], halves: int, ratios: Sequence[float], shape: Shape, *, passes: bool
) -> list[Run]:
    """Compile the model, compare it with the CPU, and return a replay for each ratio.

    Raises:
        RuntimeError: two replays take different times on the virtual clock.
        AssertionError: the results differ.
        RaceError: the streams race.
    """
    torch._dynamo.reset()
    common: dict[str, Any] = {"layers": shape.layers, "blocks": 2 * shape.pairs, "halves": halves}
    model = LayeredModel(kinds, payload=shape.payload, device="npu", **common)
    reference = LayeredModel(kinds, payload=shape.payload, device="cpu", **common)
    options = {"inner": "npugraph_ex", "disable": () if passes else PASSES}
    compiled = torch.compile(model, backend="npu_kv", fullgraph=True, options=options)
    # No two blocks are neighbours; loads take odd ones, stores even ones.
    odd = torch.arange(shape.pairs) * 2 + 1
    ids = [odd, odd.flip(0), odd - 1, odd.flip(0) - 1]
    arguments = torch.ones(shape.payload), *ids
    on_npu = [each.npu() for each in arguments]
    with torch.no_grad():
        for _ in range(2):  # the second is a replay
            found, expected = compiled(*on_npu), reference(*arguments)
        _compare(model, reference, found.cpu(), expected)
        with simulator.check_races():
            compiled(*on_npu)
            torch.npu.synchronize()
        runs = [
            _run(lambda: compiled(*on_npu), int(shape.transfer_ns(halves) / ratio))
            for ratio in ratios
        ]
    ops.raise_pending_errors()
    return runs


def _run(function: Callable[[], object], compute_ns: int) -> Run:
    simulator.operator_cost("IndexPutV2", fixed_ns=1, bytes_per_second=AT_ONCE)
    for operator in ("Mul", "Addcmul"):  # one of them in every layer
        simulator.operator_cost(operator, fixed_ns=compute_ns, bytes_per_second=AT_ONCE)
    runs = []
    for _ in range(REPLAYS):
        torch.npu.synchronize()
        simulator.reset_stats()
        ops.reset_stats()
        with simulator.timeline() as tasks:
            function()
            torch.npu.synchronize()
        calls = simulator.stats().calls
        # Not those that look whether work is over: their number depends on the machine.
        queued = sum(calls[name] for name in calls if any(part in name for part in QUEUES_WORK))
        runs.append(Run(tasks, queued, ops.stats().copies_after))
    simulator.clear_operator_costs()
    if len({run.makespan_ns for run in runs}) != 1:
        raise RuntimeError(f"replays differ: {[run.makespan_ns for run in runs]} ns")
    return runs[0]


def _compare(
    model: LayeredModel, reference: LayeredModel, found: torch.Tensor, expected: torch.Tensor
) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    for pools, others in (
        (model.device_pools, reference.device_pools),
        (model.host_pools, reference.host_pools),
    ):
        for pool, other in zip(pools, others, strict=True):
            torch.testing.assert_close(pool.cpu(), other, rtol=1e-4, atol=0)


def bound_ns(kinds: Sequence[str], halves: int, ratio: float, shape: Shape) -> float:
    """The most that a replay with the passes may take."""
    transfer = shape.transfer_ns(halves)
    compute = transfer / ratio
    one_layer = compute + transfer * len(kinds)
    return 1.05 * shape.layers * max(compute, transfer) + one_layer


def run(options: Any) -> tuple[Report, dict[str, tuple[Run, Run]]]:
    shape = Shape(options.layers, options.pairs, options.payload)
    report = Report(
        benchmark="overlap",
        title=f"{shape.layers} layers, with and without the graph passes",
        columns=[
            "every layer", "transfer / compute", "compute ms", "a way ms",
            "without ms", "with ms", "at most ms", "callbacks", "calls", "copies",
        ],
        settings={**vars(shape), "runtime": "sim"},
        notes=[
            "On the simulated NPU, on its virtual clock: no NPU took part. "
            f"{shape.pairs} pairs a layer and way, payloads of {shape.payload * 4} bytes, ids on "
            "the NPU; makespans of a replay, the copies of its inputs included."
        ],
    )  # fmt: skip
    shown: dict[str, tuple[Run, Run]] = {}
    for name, (kinds, halves) in MODELS.items():
        without, behind = (
            replays(kinds, halves, options.ratios, shape, passes=passes) for passes in (False, True)
        )
        for ratio, before, after in zip(options.ratios, without, behind, strict=True):
            if ratio == 1:
                shown[name] = before, after
            transfer = shape.layers * shape.transfer_ns(halves)
            most = bound_ns(kinds, halves, ratio, shape)
            _add(report, name, ratio, transfer, most, before, after)
            total = transfer / ratio + transfer * len(kinds)
            where = f"{name}, ratio {ratio:g}"
            report.targets += [
                Target(f"{where}: with / bound", after.makespan_ns / most, "<=", 1),
                Target(f"{where}: without / sum", before.makespan_ns / total, ">=", 1),
            ]
            if "load" in kinds:
                callbacks = 1 + shape.layers * ("store" in kinds)
                report.targets.append(
                    Target(f"{where}: callbacks with", after.callbacks, "<=", callbacks)
                )
            if halves > 1:
                copies = after.copies / before.copies
                report.targets.append(Target(f"{where}: copies, ratio", copies, "<=", 1 / halves))
    return report, shown


def _add(
    report: Report,
    name: str,
    ratio: float,
    transfer: float,
    most: float,
    before: Run,
    after: Run,
) -> None:
    def ms(ns: float) -> str:
        return f"{ns / 1e6:.2f}"

    report.line(
        name, f"{ratio:g}", ms(transfer / ratio), ms(transfer),
        ms(before.makespan_ns), ms(after.makespan_ns), ms(most),
        *(
            f"{one} -> {other}"
            for one, other in (
                (before.callbacks, after.callbacks),
                (before.calls, after.calls),
                (before.copies, after.copies),
            )
        ),
    )  # fmt: skip
    report.rows.append(
        {
            "layer": name,
            "ratio": ratio,
            "compute_ns": transfer / ratio,
            "transfer_ns": transfer,
            "bound_ns": most,
            **{
                f"{what}_{which}": value
                for which, one in ((WITHOUT, before), (WITH, after))
                for what, value in (
                    ("makespan_ns", one.makespan_ns),
                    ("callbacks", one.callbacks),
                    ("calls", one.calls),
                    ("copies", one.copies),
                )
            },
        }
    )


def plot(shown: dict[str, tuple[Run, Run]], picture: Path) -> None:
    """Draw replays: what the streams do when."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(shown), 2, figsize=(11, 1.1 + 1.3 * len(shown)), squeeze=False, layout="constrained"
    )
    colours = {"operator": "tab:blue", "batch": "tab:orange"}
    names = {"operator": "compute", "batch": "copy blocks"}
    for row, (name, runs) in zip(axes, shown.items(), strict=True):
        longest = max(run.makespan_ns for run in runs) / 1e6
        for axis, run, which in zip(row, runs, (WITHOUT, WITH), strict=True):
            begin = min(task.start_ns for task in run.tasks)
            streams = sorted({task.handle for task in run.tasks if task.kind in colours})
            streams.sort(
                key=lambda handle: min(t.start_ns for t in run.tasks if t.handle == handle)
            )
            for task in run.tasks:
                if task.kind in colours:
                    axis.barh(
                        -streams.index(task.handle),
                        (task.end_ns - task.start_ns) / 1e6,
                        left=(task.start_ns - begin) / 1e6,
                        color=colours[task.kind],
                        edgecolor="white",
                        linewidth=0.3,
                    )
            axis.set(xlim=(0, longest), yticks=[], title=f"{name}, {which} the passes")
            axis.title.set_fontsize(9)
    for axis in axes[-1]:
        axis.set_xlabel("ms on the virtual clock")
    handles = [matplotlib.patches.Patch(color=colours[kind], label=names[kind]) for kind in colours]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=1)
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--pairs", type=positive, default=24, help="blocks a layer and way")
    parser.add_argument("--payload", type=positive, default=16384, help="float32 of a block")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=RATIOS, help="transfer / compute"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the replays of ratio 1")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.plot is not None and 1 not in options.ratios:
        parser.error("--plot draws ratio 1, which --ratios leaves out")
    report, shown = run(options)
    if options.plot is not None:
        plot(shown, options.plot)
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())

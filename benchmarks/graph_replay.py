"""What a swap with ids on the NPU costs in a captured graph: on the host, the stream, at capture.

Runs on the simulated NPU. Ids are scattered: no two blocks are neighbours, nothing is merged. Bytes
are really moved, since the ids travel too, so the blocks are small. Three questions:

host     how long does NPUGraph.replay() of a graph with one swap keep its caller? Against a graph
         with one small operator in place of the swap, the eager call
         with ids on the NPU and the eager call with ids on the CPU. "done": until the stream is
         through.
start    how long from the stream reaching the swap to the first copy given to the runtime? The
         operator's own counter begins when the stream calls the host: after the ids were copied.
         What lies before is measured with stamps, which are host callbacks in C: a graph with a
         stamp, copies of the same ids to page-locked memory, and another stamp. The two add up to
         the answer (medians and 99th percentiles are added, which makes the latter pessimistic).
         A third number bounds it from above: from a stamp before the swap to a stamp behind it, in
         which all copies and the way back to the stream are too. One replay at a time, the stream
         idle before; "back to back": replays queued without a wait between them.
capture  how much longer take a capture, and compilation for npugraph_ex with the first call, when
         the swap is in the function?
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from harness import Report, Target, Times, argument_parser, finish, measure, medians, positive
from host_cost import build_bare_runtime, check, microseconds, parse_shape

from npu_kv_ops import simulator

simulator.activate()

import torch  # noqa: E402

from npu_kv_ops import ops  # noqa: E402
from npu_kv_ops.graph_passes import npugraph_ex_options  # noqa: E402

if TYPE_CHECKING:
    from harness import Contestant

HOST, START, CAPTURE = "host", "start", "capture"
REPLAY, SMALL = "replay", "graph of one operator"
EAGER_NPU, EAGER_CPU = "eager, NPU ids", "eager, CPU ids"
CALL, DONE = "call", "done"
ALONE, QUEUED = "one at a time", "back to back"
WITH, WITHOUT = "with the swap", "without"
ACL_MEMCPY_DEVICE_TO_HOST = 2
REPEAT = 3  # runs in a turn, of which the last counts
START_US = 50.0  # target: p50 from the stream reaching the swap to the first copy

swap = torch.ops.npu_kv.swap_blocks_batch.default


class Load:
    """A load of scattered blocks into equal tensors, with its ids on the NPU and on the CPU."""

    def __init__(self, pairs: int, tensors: int, block_bytes: int) -> None:
        shape = (2 * pairs, block_bytes)
        self.src = [torch.zeros(shape, dtype=torch.int8, pin_memory=True) for _ in range(tensors)]
        self.dst = [torch.zeros(shape, dtype=torch.int8, device="npu") for _ in range(tensors)]
        generator = torch.Generator().manual_seed(0)
        self.cpu_ids = [2 * torch.randperm(pairs, generator=generator) for _ in range(2)]
        self.npu_ids = [ids.npu() for ids in self.cpu_ids]
        self.scratch = torch.zeros(1, device="npu")
        self.bytes = pairs * tensors * block_bytes
        self.copies = pairs * tensors

    def __call__(self) -> None:
        swap(self.src, self.dst, *self.npu_ids)


@contextlib.contextmanager
def capture(graph: Any) -> Iterator[None]:
    """As torch.npu.graph, without the garbage collection that takes most of its time."""
    torch.npu.synchronize()
    with torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def captured(function: Callable[[], object]) -> Any:
    graph = torch.npu.NPUGraph()
    with capture(graph):
        function()
    return graph


def acl() -> ctypes.CDLL:
    """The runtime that torch_npu uses."""
    return ctypes.CDLL("libascendcl.so")


def raw_stream() -> ctypes.c_void_p:
    """The current stream, with torch_npu's task queue drained."""
    return ctypes.c_void_p(torch.npu.current_stream().npu_stream)


def read_ids(host: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy as the operator does, without what torch's copy_ does besides."""
    size = ctypes.c_size_t(ids.nbytes)
    to, of = ctypes.c_void_p(host.data_ptr()), ctypes.c_void_p(ids.data_ptr())
    check(acl().aclrtMemcpyAsync(to, size, of, size, ACL_MEMCPY_DEVICE_TO_HOST, raw_stream()))


class Stamp:
    """The times at which a stream gets to a point, on the clock of time.monotonic_ns."""

    def __init__(self, bare: ctypes.CDLL, most: int) -> None:
        # How many there are, how many there may be, the times: see bare_stamp.
        self._memory = np.zeros(2 + most, dtype=np.int64)
        self._memory[1] = most
        self._function = bare.bare_stamp

    def put_on_stream(self) -> None:
        """To be called in a capture; every replay then adds a time."""
        memory = ctypes.c_void_p(self._memory.ctypes.data)
        check(acl().aclrtLaunchHostFunc(raw_stream(), self._function, memory))

    def clear(self) -> None:
        self._memory[0] = 0

    def times(self, expected: int) -> Any:
        """The times, in ns; as many as replays are expected."""
        if self._memory[0] != expected:
            raise RuntimeError(f"{self._memory[0]} stamps instead of {expected}")
        return self._memory[2 : 2 + expected].copy()


def check_same_work(runs: dict[str, Contestant], load: Load) -> None:
    """Run each once; all but the small graph must copy the same blocks."""
    for name, run in runs.items():
        torch.npu.synchronize()
        simulator.reset_stats()
        run()
        torch.npu.synchronize()
        stats = simulator.stats()
        made = (stats.bytes["h2d"], stats.copies["h2d"])
        wanted = (0, 0) if name == SMALL else (load.bytes, load.copies)
        if made != wanted:
            raise RuntimeError(f"{name} copied {made} (bytes, copies) instead of {wanted}")
    ops.raise_pending_errors()


# --- host


def timed(call: Callable[[], object]) -> Contestant:
    def run() -> Times:
        begin = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.npu.synchronize()
        return {CALL: returned - begin, DONE: time.perf_counter() - begin}

    return run


def host_part(report: Report, bare: ctypes.CDLL, options: Any) -> None:
    for shape in options.shapes:
        load = Load(*parse_shape(shape), options.block_bytes)
        graph, small = captured(load), captured(load.scratch.zero_)
        runs = {
            REPLAY: timed(graph.replay),
            SMALL: timed(small.replay),
            EAGER_NPU: timed(load),
            EAGER_CPU: timed(lambda load=load: swap(load.src, load.dst, *load.cpu_ids)),
        }
        check_same_work(runs, load)
        times = medians(
            measure(runs, rounds=options.rounds, repeat=REPEAT, settle=torch.npu.synchronize)
        )
        ops.raise_pending_errors()
        for what in (CALL, DONE):
            ours = times[REPLAY][what]
            for other in (SMALL, EAGER_NPU, EAGER_CPU):
                theirs = times[other][what]
                report.line(
                    *(f"replay, {what}, us", shape, microseconds(ours)),
                    *(other, microseconds(theirs), f"{ours / theirs:.2f}"),
                )
        report.rows.append({"part": HOST, "shape": shape, "seconds": times})


# --- start


def percentiles(times: Any) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(times, share)) / 1e9 for share in (50, 99)}


def start_part(report: Report, bare: ctypes.CDLL, options: Any) -> None:
    load = Load(*parse_shape(options.start_shape), options.block_bytes)
    before, behind, ids_before, ids_behind = (Stamp(bare, options.replays) for _ in range(4))
    staging = [torch.empty_like(ids).pin_memory() for ids in load.cpu_ids]

    def stamped_swap() -> None:
        before.put_on_stream()
        load()
        behind.put_on_stream()

    def stamped_ids() -> None:
        ids_before.put_on_stream()
        for host, ids in zip(staging, load.npu_ids, strict=True):
            read_ids(host, ids)
        ids_behind.put_on_stream()

    with_swap, with_ids = captured(stamped_swap), captured(stamped_ids)

    def turns(replays: int, *, wait: bool) -> None:
        for stamp in (before, behind, ids_before, ids_behind):
            stamp.clear()
        for _ in range(replays):
            for graph in (with_swap, with_ids):
                graph.replay()
                if wait:
                    torch.npu.synchronize()
        torch.npu.synchronize()

    turns(min(20, options.replays), wait=True)
    seconds = {}
    for how, wait in ((ALONE, True), (QUEUED, False)):
        turns(options.replays, wait=wait)
        stats = ops.deferred_call_stats(torch.npu.current_device())
        if stats.failures:
            ops.raise_pending_errors()
        through = behind.times(options.replays) - before.times(options.replays)
        ids = ids_behind.times(options.replays) - ids_before.times(options.replays)
        seconds[how] = {"to callback": percentiles(ids), "through": percentiles(through)}
        if how == ALONE:  # the operator's counter is of the process since its start
            of_callback = {"p50": stats.p50_start_ns / 1e9, "p99": stats.p99_start_ns / 1e9}
            seconds[how]["callback to copy"] = of_callback
            seconds[how]["to copy"] = {
                share: of_callback[share] + value
                for share, value in seconds[how]["to callback"].items()
            }
    names = {
        "to callback": "stream at the swap to callback, us",
        "callback to copy": "callback to first copy, us",
        "to copy": "stream at the swap to first copy, us",
        "through": "stream at the swap to stream past it, us",
    }
    for how, parts in seconds.items():
        for part, name in names.items():
            for share, value in parts.get(part, {}).items():
                case = f"{options.start_shape}, {how}, {share}"
                report.line(name, case, microseconds(value), "", "", "")
    report.rows.append(
        {
            "part": START,
            "shape": options.start_shape,
            "replays": options.replays,
            "seconds": seconds,
        }
    )
    name = f"stream at the swap to first copy, {options.start_shape}, p50, us"
    report.targets.append(Target(name, seconds[ALONE]["to copy"]["p50"] * 1e6, "<=", START_US))


# --- capture


def capture_part(report: Report, bare: ctypes.CDLL, options: Any) -> None:
    for shape in options.shapes:
        load = Load(*parse_shape(shape), options.block_bytes)

        def with_swap(x: torch.Tensor, load: Load = load) -> torch.Tensor:
            swap(load.src, load.dst, *load.npu_ids)
            return x + 1

        def without(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def capturing(function: Callable[[torch.Tensor], object], load: Load = load) -> Contestant:
            def run() -> Times:
                begin = time.perf_counter()
                captured(lambda: function(load.scratch))
                return {"captures": time.perf_counter() - begin}

            return run

        def compiling(function: Callable[[torch.Tensor], object], load: Load = load) -> Contestant:
            def run() -> Times:
                torch._dynamo.reset()
                torch.npu.synchronize()
                begin = time.perf_counter()
                torch.compile(
                    function, backend="npugraph_ex", fullgraph=True, options=npugraph_ex_options()
                )(load.scratch)
                torch.npu.synchronize()
                return {"compiles": time.perf_counter() - begin}

            return run

        functions: dict[str, Callable[[torch.Tensor], object]] = {
            WITH: with_swap,
            WITHOUT: without,
        }
        seconds = {}
        for kind, rounds in ((capturing, options.rounds), (compiling, options.compile_rounds)):
            runs = {name: kind(function) for name, function in functions.items()}
            for name, times in medians(measure(runs, rounds=rounds, warmup=1)).items():
                seconds.setdefault(name, {}).update(times)
        torch._dynamo.reset()
        ops.raise_pending_errors()
        for what, label in (
            ("captures", "NPUGraph capture, ms"),
            ("compiles", "npugraph_ex, compile and first call, ms"),
        ):
            ours, theirs = seconds[WITH][what], seconds[WITHOUT][what]
            report.line(
                *(label, shape, f"{ours * 1e3:,.2f}"),
                *(WITHOUT, f"{theirs * 1e3:,.2f}", f"{ours / theirs:.2f}"),
            )
        report.rows.append({"part": CAPTURE, "shape": shape, "seconds": seconds})


def run(options: Any) -> Report:
    bare = build_bare_runtime()
    queue = os.environ.get("TASK_QUEUE_ENABLE", "1")
    load_average = os.getloadavg()[0]
    report = Report(
        benchmark="graph_replay",
        title="A swap with ids on the NPU in a captured graph",
        columns=["what", "pairs x tensors", "swap", "against", "its time", "ratio"],
        settings={
            "rounds": options.rounds,
            "compile_rounds": options.compile_rounds,
            "replays": options.replays,
            "block_bytes": options.block_bytes,
            "task_queue": queue,
            "load_average": load_average,
            "runtime": "sim",
        },
        notes=[
            "On the simulated NPU: no NPU took part. Streams are threads there, so their times are "
            "those of the machine's threads, which share its cores.",
            f"Host to device, scattered blocks of {options.block_bytes} bytes. Medians of "
            f"{options.rounds} rounds, of a replay or call the last of {REPEAT} in a row; "
            f"compilation: of {options.compile_rounds}; on the stream: {options.replays} replays. "
            f"TASK_QUEUE_ENABLE={queue}. Load average at the start: {load_average:.2f}.",
        ],
    )
    # start comes first: it reads a counter of the whole process.
    parts = {START: start_part, HOST: host_part, CAPTURE: capture_part}
    for name, part in parts.items():
        if name in options.parts:
            part(report, bare, options)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    everything = (HOST, START, CAPTURE)
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=60)
    parser.add_argument("--parts", nargs="+", default=everything, choices=everything)
    parser.add_argument(
        "--shapes", nargs="+", default=("4x32", "64x32"), metavar="PAIRSxTENSORS", help="of a swap"
    )
    parser.add_argument("--start-shape", default="4x32", metavar="PAIRSxTENSORS", help="of start")
    parser.add_argument("--replays", type=positive, default=1000, help="of start")
    parser.add_argument("--compile-rounds", type=positive, default=5, help="rounds of compilation")
    parser.add_argument("--block-bytes", type=positive, default=512, help="payload of a block")
    parser.add_argument(
        "--quick", action="store_true", help="one short round of everything, to see that it runs"
    )
    options: Any = parser.parse_args(arguments)
    for shape in (*options.shapes, options.start_shape):
        try:
            parse_shape(shape)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    if options.quick:
        options.rounds = options.compile_rounds = 1
        options.replays = 5
        options.shapes, options.start_shape = ("2x3",), "2x3"
    with simulator.overrides(poison=0, shuffle=0):
        return finish(run(options), options)


if __name__ == "__main__":
    sys.exit(main())

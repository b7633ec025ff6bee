"""Host cost of one eager call: the operator, vLLM-Ascend's way, and a bare C loop.

Runs on the simulated NPU, set to count copies and not to move bytes, so that what is left is the
cost on the host: building the descriptors and calling the runtime. All contestants copy the same
blocks of the same tensors from device to host, and the copies that arrive are counted.

operator      torch.ops.npu_kv.swap_blocks_batch with int64 CPU ids
numpy         what vLLM-Ascend does today: the address of every block of every tensor by numpy
              broadcasting, the sizes repeated, then a call that drains torch_npu's task queue and
              hands everything to the runtime on the caller's thread
numpy+.ptrs   the same numpy work, then our .ptrs overload, which goes through the task queue
C loop        fills the three arrays for every block and calls the runtime whenever there are as
              many as the operator puts into one call; no checks, no task queue

Two times are taken of each. "call": until the call returns, on the thread that makes it. "issued":
until the runtime has accepted every copy. They differ where the task queue's thread does the work.
In its turn a contestant runs three times in a row and the last counts; the JSON file has the first,
with cold caches, too. TASK_QUEUE_ENABLE=0 in the environment switches the task queue off.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from harness import Contestant, Report, Target, argument_parser, finish, measure, medians, positive

from npu_kv_ops import simulator

simulator.activate()

import torch  # noqa: E402

import npu_kv_ops.ops  # noqa: E402
from npu_kv_ops import _C  # noqa: E402

SHAPES = ("64x16", "64x256", "64x1024", "160x1024")
SCATTERED, CONSECUTIVE = "scattered", "consecutive"
OPERATOR, NUMPY, NUMPY_PTRS, C_LOOP = "operator", "numpy", "numpy+.ptrs", "C loop"
CALL, ISSUED = "call", "issued"
REPEAT = 3  # runs in a turn, of which the last counts

TARGET_SHAPE = "64x1024"
TARGETS_NUMPY = {SCATTERED: 15.0, CONSECUTIVE: 100.0}  # the operator this many times faster
TARGET_C_LOOP = 2.0  # the operator at most this many times the cost, scattered


def build_bare_runtime() -> ctypes.CDLL:
    """Compile bare_runtime.cpp, unless that was done before, and load it."""
    source = Path(__file__).resolve().with_name("bare_runtime.cpp")
    library = source.parent.parent / "build" / "benchmarks" / "bare_runtime.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        import torch_npu

        headers = Path(torch_npu.__file__).parent / "include" / "third_party" / "acl" / "inc"
        # A name of its own first: two benchmarks may build at the same time.
        built = library.with_name(f"{library.name}.{os.getpid()}")
        compiler = os.environ.get("CXX", "c++")
        options = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(
            [compiler, *options, f"-I{headers}", str(source), "-o", str(built)], check=True
        )
        built.replace(library)
    loaded = ctypes.CDLL(str(library))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    loaded.bare_batch_copy.argtypes = (pointer, pointer, pointer, size, integer, integer, pointer)
    loaded.bare_block_copy.argtypes = (
        *(pointer, pointer, size, pointer, pointer, size),
        *(ctypes.c_int64, size, integer, integer, pointer),
    )
    return loaded


def check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the runtime answered {code}")


class Pools:
    """Equal tensors on the device and in page-locked host memory, which nothing ever touches."""

    def __init__(self, tensors: int, blocks: int, block_bytes: int) -> None:
        shape = (blocks, block_bytes)
        self.block_bytes = block_bytes
        self.blocks = blocks
        self.device = [torch.empty(shape, dtype=torch.int8, device="npu") for _ in range(tensors)]
        self.host = [torch.empty(shape, dtype=torch.int8, pin_memory=True) for _ in range(tensors)]


def contestants(
    pools: Pools, tensors: int, src_ids: torch.Tensor, dst_ids: torch.Tensor, bare: ctypes.CDLL
) -> dict[str, Contestant]:
    """Copy the blocks of ``tensors`` tensors, device to host."""
    src, dst = pools.device[:tensors], pools.host[:tensors]
    stream = torch.npu.current_stream()
    handle = stream.npu_stream
    limit = npu_kv_ops.ops.max_batch()
    swap = torch.ops.npu_kv.swap_blocks_batch.default
    swap_ptrs = torch.ops.npu_kv.swap_blocks_batch.ptrs

    # What vLLM-Ascend prepares once for its pools. Its ids come as lists; arrays are kinder to it.
    src_base = np.array([tensor.data_ptr() for tensor in src], dtype=np.int64)
    dst_base = np.array([tensor.data_ptr() for tensor in dst], dtype=np.int64)
    stride = np.full((tensors, 1), pools.block_bytes, dtype=np.int64)
    src_array, dst_array = src_ids.numpy(), dst_ids.numpy()

    def numpy_descriptors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of = (src_base.reshape(-1, 1) + stride * src_array.reshape(1, -1)).reshape(-1)
        to = (dst_base.reshape(-1, 1) + stride * dst_array.reshape(1, -1)).reshape(-1)
        sizes = np.repeat(stride.reshape(-1), len(src_array))
        return torch.from_numpy(of), torch.from_numpy(to), torch.from_numpy(sizes)

    def call_operator() -> None:
        swap(src, dst, src_ids, dst_ids)

    def call_numpy() -> None:
        of, to, sizes = numpy_descriptors()
        raw = torch.npu.current_stream().npu_stream  # drains the task queue
        count = sizes.numel()
        check(
            bare.bare_batch_copy(to.data_ptr(), of.data_ptr(), sizes.data_ptr(), count, 0, 0, raw)
        )

    def call_numpy_ptrs() -> None:
        of, to, sizes = numpy_descriptors()
        swap_ptrs(of, to, sizes, 1)

    loop = bare.bare_block_copy
    loop_arguments = (
        *(dst_base.ctypes.data, src_base.ctypes.data, tensors),
        *(dst_ids.data_ptr(), src_ids.data_ptr(), len(src_ids)),
        *(pools.block_bytes, limit, 0, 0, handle),
    )

    def call_c_loop() -> None:
        check(loop(*loop_arguments))

    def timed(call: Callable[[], None], *, queued: bool) -> Contestant:
        def run() -> dict[str, float]:
            begin = time.perf_counter()
            call()
            returned = time.perf_counter()
            if not queued:
                return {CALL: returned - begin, ISSUED: returned - begin}
            stream.npu_stream  # noqa: B018  (drains the task queue)
            return {CALL: returned - begin, ISSUED: time.perf_counter() - begin}

        return run

    return {
        OPERATOR: timed(call_operator, queued=True),
        NUMPY: timed(call_numpy, queued=False),
        NUMPY_PTRS: timed(call_numpy_ptrs, queued=True),
        C_LOOP: timed(call_c_loop, queued=False),
    }


def check_same_work(runs: dict[str, Contestant], total_bytes: int) -> dict[str, int]:
    """Run each once and return how many copies it made; all must have copied the same bytes."""
    copies = {}
    for name, run in runs.items():
        torch.npu.synchronize()
        simulator.reset_stats()
        run()
        torch.npu.synchronize()
        stats = simulator.stats()
        if stats.bytes["d2h"] != total_bytes:
            raise RuntimeError(f"{name} copied {stats.bytes['d2h']} bytes instead of {total_bytes}")
        copies[name] = stats.copies["d2h"]
    return copies


def parse_shape(text: str) -> tuple[int, int]:
    tensors, _, blocks = text.partition("x")
    try:
        return positive(tensors), positive(blocks)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be TENSORSxBLOCKS, got {text!r}") from None


def add_targets(
    report: Report, shape: str, ids: str, times: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Add the targets of one shape and kind of ids; return the ratios that they look at."""
    ours, numpy, loop = times[OPERATOR], times[NUMPY], times[C_LOOP]
    ratios = {
        "numpy_to_operator_call": numpy[CALL] / ours[CALL],
        "numpy_to_operator_issued": numpy[ISSUED] / ours[ISSUED],
        "numpy_ptrs_to_operator_call": times[NUMPY_PTRS][CALL] / ours[CALL],
        "operator_to_c_loop_call": ours[CALL] / loop[CALL],
        "operator_to_c_loop_issued": ours[ISSUED] / loop[ISSUED],
    }
    where = f"{shape} {ids}"
    if shape == TARGET_SHAPE:
        name = f"numpy to operator, {where}, time of the call"
        ratio = ratios["numpy_to_operator_call"]
        report.targets.append(Target(name, ratio, ">=", TARGETS_NUMPY[ids]))
    if ids == SCATTERED:
        for what in (CALL, ISSUED):
            name = f"operator to C loop, {where}, time until {what}"
            ratio = ratios[f"operator_to_c_loop_{what}"]
            report.targets.append(Target(name, ratio, "<=", TARGET_C_LOOP))
    return ratios


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def run(options: argparse.Namespace) -> Report:
    shapes = [parse_shape(shape) for shape in options.shapes]
    bare = build_bare_runtime()
    # Twice as many blocks as a call copies: scattered ids leave holes.
    pools = Pools(
        max(tensors for tensors, _ in shapes),
        2 * max(blocks for _, blocks in shapes),
        options.block_bytes,
    )
    queue = os.environ.get("TASK_QUEUE_ENABLE", "1")
    names = (OPERATOR, NUMPY, NUMPY_PTRS, C_LOOP)
    report = Report(
        benchmark="host_cost",
        title="Host cost of one eager call, microseconds",
        columns=[
            *("tensors x blocks", "ids", "until", *names),
            *(f"{NUMPY} / {OPERATOR}", f"{OPERATOR} / {C_LOOP}"),
        ],
        settings={
            "rounds": options.rounds,
            "block_bytes": options.block_bytes,
            "task_queue": queue,
            "max_batch": npu_kv_ops.ops.max_batch(),
            "runtime": "sim",
        },
        notes=[
            "On the simulated NPU, which counts copies and moves nothing: no NPU took part, and "
            "the runtime's share of every time is the simulator's.",
            f"Medians of {options.rounds} rounds, in each the last of {REPEAT} runs in a row. "
            f"Device to host, blocks of {options.block_bytes} bytes, at most "
            f"{npu_kv_ops.ops.max_batch()} copies in a runtime call (numpy: all in one), "
            f"TASK_QUEUE_ENABLE={queue}.",
        ],
    )
    generator = torch.Generator().manual_seed(0)
    for shape, (tensors, blocks) in zip(options.shapes, shapes, strict=True):
        for ids in (SCATTERED, CONSECUTIVE):
            if ids == SCATTERED:
                src_ids = torch.randperm(pools.blocks, generator=generator)[:blocks]
                dst_ids = torch.randperm(pools.blocks, generator=generator)[:blocks]
            else:
                src_ids, dst_ids = torch.arange(blocks), torch.arange(blocks)
            runs = contestants(pools, tensors, src_ids, dst_ids, bare)
            copies = check_same_work(runs, tensors * blocks * options.block_bytes)
            times = medians(
                measure(runs, rounds=options.rounds, repeat=REPEAT, settle=torch.npu.synchronize)
            )
            ratios = add_targets(report, shape, ids, times)
            for what in (CALL, ISSUED):
                report.line(
                    *(shape, ids, what, *(microseconds(times[name][what]) for name in names)),
                    f"{ratios[f'numpy_to_operator_{what}']:.1f}",
                    f"{ratios[f'operator_to_c_loop_{what}']:.2f}",
                )
            report.rows.append(
                {
                    "tensors": tensors,
                    "blocks": blocks,
                    "ids": ids,
                    "seconds": times,
                    "copies": copies,
                    "ratios": ratios,
                }
            )
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=60)
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, metavar="TENSORSxBLOCKS", help="sizes of a call"
    )
    parser.add_argument(
        "--block-bytes", type=positive, default=32 * 1024, help="payload of a block"
    )
    options: Any = parser.parse_args(arguments)
    for shape in options.shapes:
        try:
            parse_shape(shape)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    # On the simulator .ptrs looks up every address, to find mistakes; here it is timed.
    checks_pointers = _C.check_all_pointers()
    _C.set_check_all_pointers(False)
    try:
        # New memory stays untouched, so that pools of any size fit.
        with simulator.overrides(poison=0, move_payload=0, shuffle=0):
            return finish(run(options), options)
    finally:
        _C.set_check_all_pointers(checks_pointers)


if __name__ == "__main__":
    sys.exit(main())

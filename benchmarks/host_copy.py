"""Host-to-host copies: bytes per second of the operator, plain memcpy and torch's index_copy_.

Every contestant moves the same number of bytes between the same two pools, in one thread:

memcpy        one memmove of the C library over a contiguous range: what the memory can do
operator      swap_blocks_batch with scattered ids
index_copy_   torch: rows that lie in order, to scattered rows (half the work of the operator)
gather+copy   torch: index_select, then index_copy_ (the work of the operator)

torch copies rows of int64, which is faster than rows of bytes. The pools are several times larger
than the caches, and every run works on another part of them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    # torch alone: no NPU takes part.
    os.environ["NPU_KV_RUNTIME"] = "host"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import Contestant, Report, Target, argument_parser, finish, measure, medians, positive

import npu_kv_ops.ops  # noqa: F401  (registers the operator)

KIB = 1024
BLOCK_BYTES = tuple(KIB << power for power in range(2, 13))  # 4 KiB to 4 MiB
TARGET_FROM = 32 * KIB
TARGET = 0.9
MEMCPY, OPERATOR, INDEX_COPY, GATHER_COPY = "memcpy", "operator", "index_copy_", "gather+copy"


def timed(work: Callable[[], object]) -> dict[str, float]:
    begin = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - begin}


def contestants(
    src: torch.Tensor, dst: torch.Tensor, block_bytes: int, copy_bytes: int
) -> dict[str, Contestant]:
    """Copies of ``copy_bytes`` between two pools, flat int8 tensors of equal size."""
    count = copy_bytes // block_bytes
    src_blocks = src.view(-1, block_bytes)
    dst_blocks = dst.view(-1, block_bytes)
    src_rows, dst_rows = src_blocks.view(torch.int64), dst_blocks.view(torch.int64)
    ids = torch.Generator().manual_seed(0)

    def scattered() -> torch.Tensor:
        return torch.randperm(len(src_blocks), generator=ids)[:count]

    def offset() -> int:
        return int(torch.randint(0, src.numel() - copy_bytes + 1, (1,), generator=ids)) & ~4095

    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def memcpy() -> dict[str, float]:
        to, of = dst.data_ptr() + offset(), src.data_ptr() + offset()
        return timed(lambda: memmove(to, of, count * block_bytes))

    def operator() -> dict[str, float]:
        of, to = scattered(), scattered()
        swap = torch.ops.npu_kv.swap_blocks_batch
        return timed(lambda: swap([src_blocks], [dst_blocks], of, to))

    def index_copy() -> dict[str, float]:
        first = offset() // block_bytes
        rows, to = src_rows[first : first + count], scattered()
        return timed(lambda: dst_rows.index_copy_(0, to, rows))

    def gather_copy() -> dict[str, float]:
        of, to = scattered(), scattered()
        return timed(lambda: dst_rows.index_copy_(0, to, src_rows.index_select(0, of)))

    return {MEMCPY: memcpy, OPERATOR: operator, INDEX_COPY: index_copy, GATHER_COPY: gather_copy}


def size_name(size: int) -> str:
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // KIB // KIB} MiB"


def run(options: argparse.Namespace) -> Report:
    pool_bytes = options.pool_mib * KIB * KIB
    copy_bytes = options.copy_mib * KIB * KIB
    src = torch.zeros(pool_bytes, dtype=torch.int8)
    dst = torch.zeros(pool_bytes, dtype=torch.int8)
    src.random_(0, 127)
    dst.fill_(1)  # every page is there before anything is timed

    report = Report(
        benchmark="host_copy",
        title="Host to host, GB/s (one thread each, scattered blocks, larger is better)",
        columns=["block", MEMCPY, OPERATOR, INDEX_COPY, GATHER_COPY, f"{OPERATOR} / {MEMCPY}"],
        settings={
            "rounds": options.rounds,
            "pool_bytes": pool_bytes,
            "copy_bytes": copy_bytes,
            "torch_threads": torch.get_num_threads(),
        },
        notes=[
            f"Medians of {options.rounds} rounds; {options.copy_mib} MiB a copy, two pools of "
            f"{options.pool_mib} MiB; torch threads: {torch.get_num_threads()}. No NPU takes part."
        ],
    )
    for block_bytes in options.block_bytes:
        times = medians(
            measure(contestants(src, dst, block_bytes, copy_bytes), rounds=options.rounds)
        )
        rates = {name: copy_bytes / time["seconds"] for name, time in times.items()}
        ratio = rates[OPERATOR] / rates[MEMCPY]
        report.line(
            size_name(block_bytes),
            *(f"{rate / 1e9:.2f}" for rate in rates.values()),
            f"{ratio:.2f}",
        )
        report.rows.append(
            {"block_bytes": block_bytes, "bytes_per_second": rates, "ratio_to_memcpy": ratio}
        )
        if block_bytes >= TARGET_FROM:
            name = f"operator to memcpy, blocks of {size_name(block_bytes)}"
            report.targets.append(Target(name, ratio, ">=", TARGET))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=15)
    parser.add_argument("--pool-mib", type=positive, default=512, help="size of each pool")
    parser.add_argument("--copy-mib", type=positive, default=128, help="size of one copy")
    parser.add_argument(
        "--block-bytes", type=positive, nargs="+", default=BLOCK_BYTES, help="sizes of a block"
    )
    options = parser.parse_args(arguments)
    for block_bytes in options.block_bytes:
        if options.copy_mib * KIB * KIB % block_bytes or block_bytes % 8:
            parser.error(
                f"--block-bytes {block_bytes} must be a multiple of 8 that divides --copy-mib"
            )
    if options.copy_mib > options.pool_mib:
        parser.error("--copy-mib must not be above --pool-mib")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return finish(run(options), options)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())

"""A load in a `torch.npu.NPUGraph`: a replay copies the blocks that its ids name by then."""

from __future__ import annotations

import sys

import npu_kv_ops
from npu_kv_ops.cli.runtime_choice import choose

LAYERS, HOST_BLOCKS, BLOCKS, PAIRS = 4, 64, 32, 6


def main() -> int:
    if choose("auto") == "host":
        sys.exit("there is no NPU, and no torch_npu to simulate one for")
    import torch

    host = [torch.randn(HOST_BLOCKS, 16, 8).pin_memory() for _ in range(LAYERS)]
    device = [torch.zeros(BLOCKS, 16, 8).npu() for _ in range(LAYERS)]
    src, dst = (torch.full((PAIRS,), -1).npu() for _ in range(2))  # -1: no copy

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.ops.npu_kv.swap_blocks_batch(host, device, src, dst)
        doubled = [layer * 2 for layer in device]

    expected = [layer.cpu() for layer in device]
    good = True
    for count in range(2, PAIRS + 1):
        blocks, slots = torch.randperm(HOST_BLOCKS)[:count], torch.randperm(BLOCKS)[:count]
        for place, values in ((src, blocks), (dst, slots)):
            place.copy_(torch.nn.functional.pad(values, (0, PAIRS - count), value=-1))
        graph.replay()
        torch.npu.synchronize()
        npu_kv_ops.raise_pending_errors()  # a wrong id, a failed copy
        for wanted, pool, cache, result in zip(expected, host, device, doubled):
            wanted[slots] = pool[blocks]
            good &= torch.equal(cache.cpu(), wanted) and torch.equal(result.cpu(), wanted * 2)
    print("ok  " if good else "FAIL", "torch.npu.NPUGraph: 5 replays, new blocks in each")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

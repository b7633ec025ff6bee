"""A load in a graph of torchair in mode `reduce-overhead`."""

from __future__ import annotations

import sys

import npu_kv_ops
from npu_kv_ops.cli.runtime_choice import choose

LAYERS, HOST_BLOCKS, BLOCKS, PAIRS = 4, 64, 32, 6


def main() -> int:
    if choose("auto") == "host":
        sys.exit("there is no NPU, and no torch_npu to simulate one for")
    import torch
    import torchair

    from npu_kv_ops.graph_passes import torchair_config

    # Layers that are views of one allocation: what torchair_config() is needed for.
    host = list(torch.randn(LAYERS, HOST_BLOCKS, 16, 8).pin_memory().unbind(0))
    device = list(torch.zeros(LAYERS, BLOCKS, 16, 8).npu().unbind(0))

    def step(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        torch.ops.npu_kv.swap_blocks_batch(host, device, src, dst)
        return torch.stack(device) * 2

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    backend = torchair.get_npu_backend(compiler_config=torchair_config(config))
    graphed = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    expected = [layer.cpu() for layer in device]
    good = True
    for count in range(2, PAIRS + 1):
        blocks, slots = torch.randperm(HOST_BLOCKS)[:count], torch.randperm(BLOCKS)[:count]
        padding = (0, PAIRS - count)
        src, dst = (torch.nn.functional.pad(one, padding, value=-1) for one in (blocks, slots))
        doubled = graphed(src.npu(), dst.npu())
        torch.npu.synchronize()
        npu_kv_ops.raise_pending_errors()  # a wrong id, a failed copy
        for wanted, pool, cache, result in zip(expected, host, device, doubled):
            wanted[slots] = pool[blocks]
            good &= torch.equal(cache.cpu(), wanted) and torch.equal(result.cpu(), wanted * 2)
    print("ok  " if good else "FAIL", "torchair reduce-overhead: 5 replays, new blocks in each")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""The same code compiled for the CPU: copies between host tensors, with inductor or aot_eager.

python examples/graphs/inductor_backend.py [--backend aot_eager]
"""

from __future__ import annotations

import argparse
import sys

from npu_kv_ops.cli.runtime_choice import choose

LAYERS, HOST_BLOCKS, BLOCKS, PAIRS = 4, 64, 32, 6


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    options = parser.parse_args()
    choose("host")
    import torch

    host = [torch.randn(HOST_BLOCKS, 16, 8) for _ in range(LAYERS)]
    device = [torch.zeros(BLOCKS, 16, 8) for _ in range(LAYERS)]

    def step(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        torch.ops.npu_kv.swap_blocks_batch(host, device, src, dst)
        return torch.stack(device) * 2

    graphed = torch.compile(step, backend=options.backend, fullgraph=True, dynamic=False)

    expected = [layer.clone() for layer in device]
    good = True
    for count in range(2, PAIRS + 1):
        blocks, slots = torch.randperm(HOST_BLOCKS)[:count], torch.randperm(BLOCKS)[:count]
        padding = (0, PAIRS - count)
        src, dst = (torch.nn.functional.pad(one, padding, value=-1) for one in (blocks, slots))
        doubled = graphed(src, dst)
        for wanted, pool, cache, result in zip(expected, host, device, doubled):
            wanted[slots] = pool[blocks]
            good &= torch.equal(cache, wanted) and torch.equal(result, wanted * 2)
    print("ok  " if good else "FAIL", f"{options.backend}: 5 calls, new blocks in each")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

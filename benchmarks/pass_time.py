"""How much of a compilation the graph passes take, and how that grows with the graph.

Runs on the simulated NPU. Graphs of npugraph_ex with 32, 64 and 128 layers of 31 nodes: a load
into the layer's pool, additions, one read of the pool. Each pool is a storage of its own; the
middle size is measured again with all pools of a side in one storage.

nodes    of the graph that the passes get, with its inputs
compile  the first call of the compiled model, with everything: Dynamo, compiler, capture, a replay
passes   all that the manager does: passes, checks, copies of the graph

Processor time of the process, so that waiting for a core does not count; medians over the rounds.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import Report, Target, Times, argument_parser, finish, measure, medians, positive

from npu_kv_ops import simulator

simulator.activate()

import torch  # noqa: E402

from npu_kv_ops import ops  # noqa: E402
from npu_kv_ops.graph_passes import PassManager, PassReport  # noqa: E402

SEPARATE, SHARED = "each its own", "one for all"
ADDITIONS = 22  # nodes of a layer besides the 9 for its pools, its swap and its read
PAIRS, PAYLOAD = 2, 16
SHARE, GROWTH = 5.0, 1.5  # targets: per cent of the compilation; time per node, largest / smallest


class TimedManager(PassManager):
    """The passes of this package; keeps the report and the processor time of the last graph."""

    graphs, seconds, report = 0, 0.0, PassReport()

    def __call__(self, module: torch.fx.GraphModule) -> PassReport:
        begin = time.process_time()
        self.report = super().__call__(module)
        self.seconds = time.process_time() - begin
        self.graphs += 1
        return self.report


class Model(torch.nn.Module):
    """Layers that load into a pool, add, and read the pool."""

    def __init__(self, swaps: int, storages: str) -> None:
        super().__init__()
        number, pools = (1, swaps) if storages == SHARED else (swaps, 1)
        shape = (pools, 2 * PAIRS, PAYLOAD)
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(number):
            host, device = torch.ones(shape, pin_memory=True), torch.zeros(shape, device="npu")
            self.pools += zip(host, device, strict=True)

    def forward(self, x: torch.Tensor, step: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for host, device in self.pools:
            torch.ops.npu_kv.swap_blocks_batch([host], [device], ids, ids)
            for _ in range(ADDITIONS):
                x = x + step
            x = x + device[1]
        return x


def compilation(swaps: int, storages: str, counts: set[int]) -> Times:
    """Compile a model and return the times; adds the nodes that the passes got to ``counts``.

    Raises:
        RuntimeError: the model was not one graph, a pass was refused or left a swap functional, or
            the result is wrong.
    """
    torch._dynamo.reset()
    model, manager = Model(swaps, storages), TimedManager()
    options = {"inner": "npugraph_ex", "passes": manager}
    compiled = torch.compile(model, backend="npu_kv", fullgraph=True, options=options)
    # Small whole numbers, whose sums are exact.
    arguments = torch.zeros(PAYLOAD).npu(), torch.ones(PAYLOAD).npu(), torch.arange(PAIRS).npu()
    torch.npu.synchronize()
    begin = time.process_time()
    with torch.no_grad():
        found = compiled(*arguments)
    torch.npu.synchronize()
    seconds = time.process_time() - begin
    ops.raise_pending_errors()
    if not torch.equal(found.cpu(), torch.full((PAYLOAD,), swaps * (ADDITIONS + 1.0))):
        raise RuntimeError(f"the model returned {found.cpu()}")
    passes = manager.report.passes
    if manager.graphs != 1 or any(one.refused for one in passes) or passes[0].changes != swaps:
        raise RuntimeError(f"{swaps} swaps in {manager.graphs} graphs: {manager.report}")
    counts.add(passes[0].nodes_before)
    return {"compile": seconds, "passes": manager.seconds}


def run(options: Any) -> Report:
    swaps = sorted(set(options.swaps))
    middle = swaps[len(swaps) // 2]
    sizes = [*((each, SEPARATE) for each in swaps), (middle, SHARED)]
    counts: dict[tuple[int, str], set[int]] = {size: set() for size in sizes}
    contestants = {str(size): functools.partial(compilation, *size, counts[size]) for size in sizes}
    compilation(2, SEPARATE, set())  # what only the first one pays
    samples = measure(contestants, rounds=options.rounds, warmup=0)
    report = Report(
        benchmark="pass_time",
        title="The graph passes and the compilation around them, processor time",
        columns=["storages", "nodes", "swaps", "compile s", "passes ms", "passes %", "ms / 1,000"],
        settings={"additions": ADDITIONS, "rounds": options.rounds, "runtime": "sim"},
        notes=[
            "On the simulated NPU: no NPU took part. ms / 1,000: of the passes, per 1,000 nodes."
        ],
    )
    per_node: dict[tuple[int, str], float] = {}
    for size in sizes:
        number, storages = size
        times = medians(samples)[str(size)]
        (nodes,) = counts[size]
        share = 100 * times["passes"] / times["compile"]
        per_node[size] = times["passes"] / nodes
        report.line(
            storages, f"{nodes:,}", str(number), f"{times['compile']:.2f}",
            f"{times['passes'] * 1e3:.1f}", f"{share:.2f}", f"{per_node[size] * 1e6:.1f}",
        )  # fmt: skip
        report.rows.append(
            {"storages": storages, "nodes": nodes, "swaps": number, "seconds": samples[str(size)]}
        )
        if number == middle:
            what = f"{nodes:,} nodes, {number} swaps, storages {storages}"
            report.targets.append(Target(f"{what}: per cent of compile", share, "<=", SHARE))
    growth = per_node[swaps[-1], SEPARATE] / per_node[swaps[0], SEPARATE]
    report.targets.append(Target("time per node, largest / smallest", growth, "<=", GROWTH))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument("--swaps", type=positive, nargs="+", default=[32, 64, 128])
    options = parser.parse_args(arguments)
    return finish(run(options), options)


if __name__ == "__main__":
    sys.exit(main())

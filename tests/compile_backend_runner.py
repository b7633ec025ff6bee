"""The backend npu_kv with one inner backend, on an NPU: ``compile_backend_runner.py INNER``.

Prints a line of JSON for each scenario. A scenario that fails ends the process with a traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

import npu_kv_ops.ops
from npu_kv_ops import simulator

LAYERS, BLOCKS, PAYLOAD, PAIRS, CALLS = 4, 16, 64, 8, 20
BLOCK_BYTES = PAYLOAD * 2

inner = sys.argv[1]
captures = inner != "eager"
swap = torch.ops.npu_kv.swap_blocks_batch
start, wait = torch.ops.npu_kv.swap_blocks_start, torch.ops.npu_kv.swap_blocks_wait
Tensors = list[torch.Tensor]
Function = Callable[[Tensors, Tensors, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    for name, scenario in SCENARIOS.items():
        torch._dynamo.reset()
        counters.clear()
        print(json.dumps({"scenario": name, **scenario()}), flush=True)
    npu_kv_ops.raise_pending_errors()


def layer_by_layer(
    host: Tensors, device: Tensors, out: torch.Tensor, load: torch.Tensor, to: torch.Tensor
) -> torch.Tensor:
    """Loads and computes layer by layer, then stores what it has computed in each layer."""
    total = torch.zeros_like(device[0][0])
    for one, other in zip(host, device):
        swap([one], [other], load, to)
        total = total + other.sum(0)
        other.mul_(-1)
    for one, other in zip(host, device):
        swap([other], [one], to, out)
    return total


def by_hand(
    host: Tensors, device: Tensors, out: torch.Tensor, load: torch.Tensor, to: torch.Tensor
) -> torch.Tensor:
    total = torch.zeros_like(device[0][0])
    ticket = start(host, device, load, to, [1] * LAYERS)
    for part, (one, other) in enumerate(zip(host, device)):
        wait(ticket, [one], [other], part)
        total = total + other.sum(0)
        other.mul_(-1)
    ticket = start(device, host, to, out)
    total = total * 1
    wait(ticket, device, host)
    return total


def pools(shared: bool) -> Tensors:
    whole = torch.randn(LAYERS, BLOCKS, PAYLOAD).half()
    return list(whole.unbind(0)) if shared else [one.clone() for one in whole.unbind(0)]


def new_ids(round_: int) -> Tensors:
    """Blocks of the host to write and to read, blocks of the NPU; padded differently each time."""
    out_and_in, to = torch.randperm(BLOCKS), torch.randperm(BLOCKS)[:PAIRS]
    to[torch.randperm(PAIRS)[: round_ % (PAIRS + 1)]] = -1
    return [out_and_in[:PAIRS], out_and_in[PAIRS:], to]


def run(
    function: Function, shared: bool, transfers: int | None = None, **options: Any
) -> Callable[[], dict[str, Any]]:
    """Calls ``function`` with new ids again and again, and the same on the CPU.

    ``transfers``: how many there have to be after the passes, each of which reads its ids once.
    """

    def scenario() -> dict[str, Any]:
        expected = pools(shared), pools(shared)
        host: Tensors = [one.pin_memory() for one in expected[0]]
        device: Tensors = [one.npu() for one in expected[1]]
        if shared:
            host = list(torch.stack(expected[0]).pin_memory().unbind(0))
            device = list(torch.stack(expected[1]).npu().unbind(0))
        compiled = torch.compile(
            function, backend="npu_kv", fullgraph=True, options={"inner": inner, **options}
        )
        for round_ in range(CALLS):
            ids = new_ids(round_)
            on_device = [one.npu() for one in ids]
            torch.npu.synchronize()
            simulator.reset_stats()
            total = compiled(host, device, *on_device)
            torch.npu.synchronize()
            stats = simulator.stats()
            wanted = function(*expected, *ids)
            torch.testing.assert_close(total.cpu(), wanted, rtol=2e-2, atol=0.2)
            for found, right in zip(host + device, expected[0] + expected[1], strict=True):
                assert torch.equal(found.cpu(), right), f"call {round_}"
            if round_ == 0:
                continue
            payload = int((ids[2] >= 0).sum()) * LAYERS * BLOCK_BYTES
            one_read = 2 * PAIRS * 8
            assert stats.bytes["h2d"] == payload, (round_, stats.bytes, payload)
            reads, rest = divmod(stats.bytes["d2h"] - payload, one_read)
            assert rest == 0, (round_, stats.bytes, payload)
            assert transfers is None or reads == transfers, (round_, reads)
            if captures:
                assert stats.calls.get("aclmdlRICaptureBegin", 0) == 0, f"call {round_} captured"
                assert stats.calls["aclmdlRIExecuteAsync"] == 1
                # The ids, into memory of the graph's own.
                assert stats.bytes["d2d"] in (0, 3 * PAIRS * 8), (round_, stats.bytes)
        assert counters["stats"]["unique_graphs"] == 1
        npu_kv_ops.raise_pending_errors()
        return {"passes": dict(counters["npu_kv"]), "reads of ids": reads}

    return scenario


def cpu_ids() -> dict[str, Any]:
    """Refused at compile time where a graph is captured; the function goes on."""
    host, device = torch.ones(4, 8).pin_memory(), torch.zeros(4, 8).npu()

    @torch.compile(backend="npu_kv", fullgraph=True, options={"inner": inner})
    def function(ids: torch.Tensor) -> torch.Tensor:
        swap([host], [device], ids, ids)
        return ids + 1

    error = ""
    try:
        function(torch.tensor([1]))
    except torch._dynamo.exc.TorchRuntimeError as raised:
        error = str(raised)
    function(torch.tensor([2]).npu())
    torch.npu.synchronize()
    assert device.cpu().sum(1).tolist() == [0, 0 if captures else 8, 8, 0]
    return {"refused for": error.partition(" in a graph for ")[2].partition(":")[0]}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "separate": run(layer_by_layer, shared=False, transfers=2),
    "shared": run(layer_by_layer, shared=True, transfers=2),
    "no merge": run(layer_by_layer, shared=True, transfers=2 * LAYERS, disable=["merge"]),
    "no passes": run(layer_by_layer, False, disable=["reinplace", "merge", "overlap"]),
    "by hand": run(by_hand, shared=False, transfers=2),
    "CPU ids": cpu_ids,
}
if len(sys.argv) > 2:
    SCENARIOS = {name: SCENARIOS[name] for name in sys.argv[2:]}

if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    torch.npu.set_device(0)

    main()

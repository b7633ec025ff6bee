"""The decoder with its swaps inside the captured step: ``graph_decoder_runner.py MODE``.

Prints a line of JSON for each way to swap, in modes that compile with and without the graph passes;
a wrong token ends the process with a traceback.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from npu_kv_ops import ops, simulator
from npu_kv_ops.testing import (
    CapturedStep,
    DecoderConfig,
    PagedDecoder,
    Request,
    Server,
    StepSwap,
    SwappingDecoder,
)

PROMPTS = [[(7 * i + 3 * i * i + n) % 128 for i in range(n)] for n in (5, 20, 37, 11)]
TOKENS, BATCH, AMPLE, SCARCE, PAIRS = 20, 2, 20, 8, 12
mode = sys.argv[1]
device = "cpu" if mode in ("aot_eager", "inductor") else "npu"
compiles = mode not in ("npugraph", "make_graphed_callables")


def captured(model: SwappingDecoder, passes: bool) -> Any:
    if mode == "npugraph":
        return CapturedStep(model)
    if mode == "make_graphed_callables":
        rows = [torch.zeros(BATCH, dtype=torch.int64, device=device) for _ in range(4)]
        tables = torch.zeros(
            BATCH, model.decoder.config.max_blocks, dtype=torch.int64, device=device
        )
        ids = [torch.full((PAIRS,), -1, dtype=torch.int64, device=device) for _ in range(4)]
        return torch.npu.make_graphed_callables(model, (*rows, tables, *ids))
    if passes:
        inner = {"aot_eager": "eager"}.get(mode, mode)
        return torch.compile(
            model, backend="npu_kv", options={"inner": inner}, fullgraph=True, dynamic=False
        )
    backend: Any = mode
    if mode == "torchair":
        import torchair

        config = torchair.CompilerConfig()
        config.mode = "reduce-overhead"
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def generate(
    per_layer: bool | None, *, zero: bool = False, passes: bool = False
) -> tuple[list[Request], int, int]:
    """The requests, the blocks that were loaded in steps, and the virtual time of the steps."""
    blocks = AMPLE if per_layer is None else SCARCE
    where = "cpu" if per_layer is None else device
    decoder = PagedDecoder(DecoderConfig(layers=2), blocks, device=where)
    swap = step = None
    spent = 0
    if per_layer is not None:
        swap = StepSwap(decoder, 32, pairs=PAIRS, zero=zero)
        graph = captured(SwappingDecoder(decoder, swap, per_layer=per_layer), passes)

        def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal spent
            arguments = *inputs, *swap.ids()
            if device == "cpu":
                return graph(*arguments)
            torch.npu.synchronize()
            begin = simulator.now_ns()
            result = graph(*arguments)
            torch.npu.synchronize()
            spent += simulator.now_ns() - begin
            return result

    server = Server(decoder, batch=BATCH, step=step, swap=swap)
    requests = [Request(prompt) for prompt in PROMPTS]
    server.generate(requests, TOKENS)
    ops.raise_pending_errors()
    return requests, swap.blocks_in_steps if swap is not None else 0, spent


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [request.generated for request in requests]


def main() -> None:
    torch.set_num_threads(1)
    reference, _, _ = generate(None)
    ways = [(False, False), (True, False)] + [(False, True), (True, True)] * compiles
    for per_layer, passes in ways:
        torch._dynamo.reset()
        found, moved, spent = generate(per_layer, passes=passes)
        assert moved > 0, "no block moved inside a step"
        assert tokens_of(found) == tokens_of(reference)
        for one, other in zip(found, reference):
            torch.testing.assert_close(
                torch.stack(one.logits), torch.stack(other.logits), rtol=0, atol=1e-4
            )
        torch._dynamo.reset()
        spoiled, _, _ = generate(per_layer, zero=True, passes=passes)
        assert tokens_of(spoiled) != tokens_of(reference), "the swaps do not matter"
        line = {"per_layer": per_layer, "passes": passes, "blocks": moved, "virtual_ns": spent}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

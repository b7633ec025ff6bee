"""A small decoder whose KV cache does not fit: block copies between or in the steps of a model.

Several prompts share a pool of device blocks that is too small for all of them. They take turns,
and the blocks of those that wait are moved to host memory and back by ``swap_blocks_batch``. The
tokens must be those of a run on the CPU with a pool that is large enough. As a control, the blocks
are zeroed when they come back, and the tokens must change: so what was moved was needed, and was
moved right.

    python examples/paged_decoder.py
    python examples/paged_decoder.py --mode npugraph_ex --layers 8
    python examples/paged_decoder.py --swap per-layer

With ``--swap all-at-once`` or ``per-layer`` the copies are part of the decode step, and so of its
graph: each step is given the ids of the blocks that move in it.

Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from npu_kv_ops.cli.runtime_choice import (
    DESCRIPTIONS,
    RuntimeChoiceError,
    add_runtime_option,
    choose,
)

if TYPE_CHECKING:
    from npu_kv_ops.testing import (
        BlockSwap,
        DecoderConfig,
        PagedDecoder,
        Request,
        Server,
        Step,
        StepSwap,
        SwappingDecoder,
    )

PROMPT_TOKENS = (5, 20, 37, 11)
BATCH = 2
PAIRS = 12  # blocks that can move in a step
LOGITS_TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    options = parse(arguments)
    try:
        runtime = choose(options.runtime)
    except RuntimeChoiceError as error:
        print(f"paged_decoder: {error}", file=sys.stderr)
        return 2

    import torch

    from npu_kv_ops.testing import DecoderConfig

    torch.set_num_threads(1)  # the matrices are small: more threads only wait for one another
    device = "cpu" if runtime == "host" else "npu"
    config = DecoderConfig(layers=options.layers)
    prompts = make_prompts(config)
    lengths = [len(prompt) + options.tokens for prompt in prompts]
    ample = sum(-(-length // config.block_tokens) for length in lengths) + BATCH + 1
    # Enough for one turn of the two longest, not for all four.
    scarce = sum(sorted(-(-length // config.block_tokens) for length in lengths)[-BATCH:]) + 1
    print(
        f"decoder of {config.layers} layers on {DESCRIPTIONS[runtime]}, decode step: "
        f"{options.mode}, swaps: {options.swap}"
    )

    reference = generate(config, prompts, options.tokens, "cpu", ample)
    swapped = {"mode": options.mode, "swap": options.swap}
    checks: list[tuple[str, int, dict[str, Any], bool]] = [
        ("a pool that is large enough", ample, {"mode": options.mode}, True),
        ("a pool that is too small, blocks swapped", scarce, swapped, True),
        ("control, swapped-in blocks zeroed", scarce, {**swapped, "zero": True}, False),
    ]
    passed = True
    for name, blocks, how, must_agree in checks:
        found = generate(config, prompts, options.tokens, device, blocks, **how)
        same, difference = compare(found, reference)
        good = same and difference <= LOGITS_TOLERANCE if must_agree else not same
        passed &= good
        print(
            f"{'ok  ' if good else 'FAIL'} {name} ({blocks} blocks): tokens "
            f"{'equal' if same else 'differ'}, logits differ by at most {difference:.1e}"
        )
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_runtime_option(parser)
    parser.add_argument(
        "--mode",
        choices=("eager", "npugraph", "npugraph_ex", "torchair"),
        default="npugraph",
        help="how a decode step runs (default: captured as a torch.npu.NPUGraph)",
    )
    parser.add_argument(
        "--swap",
        choices=("between-steps", "all-at-once", "per-layer"),
        default="between-steps",
        help="when blocks move (default: between the steps): inside the step for all layers at its "
        "start, or for each layer before it computes",
    )
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate, default 24")
    options = parser.parse_args(arguments)
    if options.runtime == "host":
        options.mode = "eager"
    return options


def make_prompts(config: DecoderConfig) -> list[list[int]]:
    """Random prompts, the same every time."""
    import torch

    random = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, config.vocabulary, (length,), generator=random).tolist()
        for length in PROMPT_TOKENS
    ]


def make_step(model: PagedDecoder | SwappingDecoder, mode: str) -> Any:
    """Return what computes a decode step in one of the modes of ``--mode``."""
    import torch

    from npu_kv_ops.testing import CapturedStep

    if mode == "npugraph":
        return CapturedStep(model)
    if mode == "npugraph_ex":
        return torch.compile(model, backend="npugraph_ex", fullgraph=True, dynamic=False)
    if mode == "torchair":
        import torchair

        config = torchair.CompilerConfig()
        config.mode = "reduce-overhead"
        backend = torchair.get_npu_backend(compiler_config=config)
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return model


def make_swapping_step(decoder: PagedDecoder, swap: StepSwap, mode: str, per_layer: bool) -> Step:
    """Return what computes a decode step that moves the blocks which ``swap`` has collected."""
    from npu_kv_ops.testing import SwappingDecoder

    model = make_step(SwappingDecoder(decoder, swap, per_layer=per_layer), mode)
    return lambda *inputs: model(*inputs, *swap.ids())


def make_server(
    decoder: PagedDecoder, mode: str, swap: str | None, host_blocks: int, zero: bool
) -> tuple[Server, BlockSwap | None]:
    """Return the server of a decoder, and what moves its blocks."""
    from npu_kv_ops.testing import BlockSwap, Server, StepSwap

    if swap is None:
        return Server(decoder, batch=BATCH, step=make_step(decoder, mode)), None
    if swap != "between-steps":
        in_steps = StepSwap(decoder, host_blocks, pairs=PAIRS, zero=zero)
        step = make_swapping_step(decoder, in_steps, mode, swap == "per-layer")
        return Server(decoder, batch=BATCH, step=step, swap=in_steps), in_steps

    def spoil(returned: list[int]) -> None:
        for cache in decoder.kv_caches.values():
            for tensor in cache:
                tensor[returned] = 0

    between = BlockSwap(decoder, host_blocks)
    step = make_step(decoder, mode)
    after = spoil if zero else None
    return Server(decoder, batch=BATCH, step=step, swap=between, after_swap_in=after), between


def generate(
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    device: str,
    blocks: int,
    *,
    mode: str = "eager",
    swap: str | None = None,
    zero: bool = False,
) -> list[Request]:
    """Generate for all prompts over a pool of ``blocks`` blocks.

    Args:
        config: of the decoder.
        prompts: token lists.
        tokens: how many to generate for each.
        device: ``cpu`` or ``npu``.
        blocks: size of the device pool.
        mode: how decode steps run.
        swap: move blocks to the host and back where the pool is too small; when, as ``--swap``.
        zero: spoil the blocks that come back.
    """
    from npu_kv_ops import raise_pending_errors
    from npu_kv_ops.testing import PagedDecoder, Request, StepSwap

    decoder = PagedDecoder(config, blocks, device=device)
    server, swapper = make_server(decoder, mode, swap, 4 * blocks, zero)
    requests = [Request(prompt) for prompt in prompts]
    server.generate(requests, tokens)
    raise_pending_errors()
    if swapper is not None:
        moved = swapper.blocks_in
        print(f"     {swapper.blocks_out} blocks to the host, {moved} back", end="")
        if isinstance(swapper, StepSwap):
            moved = swapper.blocks_in_steps
            print(f", {moved} of them inside steps", end="")
        print()
        if moved == 0:
            raise RuntimeError(f"a pool of {blocks} blocks is not too small: nothing was swapped")
    return requests


def compare(found: Sequence[Request], expected: Sequence[Request]) -> tuple[bool, float]:
    """Return whether the tokens are equal, and the largest difference of logits."""
    import torch

    same = all(one.generated == other.generated for one, other in zip(found, expected))
    differences = [
        (torch.stack(one.logits) - torch.stack(other.logits)).abs().max().item()
        for one, other in zip(found, expected)
    ]
    return same, max(differences)


if __name__ == "__main__":
    sys.exit(main())

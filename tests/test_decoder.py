"""The small decoder: right on the CPU, the same on the simulated NPU, with and without swapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from npu_kv_ops.testing import (
    BlockSwap,
    CapturedStep,
    DecoderConfig,
    PagedDecoder,
    Request,
    Server,
)

if TYPE_CHECKING:
    from conftest import RunScript

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMPTS = [
    [(7 * i + 3 * i * i + length) % 128 for i in range(length)] for length in (5, 20, 37, 11)
]
TOKENS, BATCH, AMPLE, SCARCE = 20, 2, 20, 8


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are small: on a busy machine several threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def serve(
    device: str,
    *,
    layers: int = 2,
    blocks: int = AMPLE,
    captured: bool = False,
    swap: bool = False,
    zero: bool = False,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    tokens: int = TOKENS,
) -> list[Request]:
    decoder = PagedDecoder(DecoderConfig(layers=layers), blocks, device=device)

    def spoil(returned: list[int]) -> None:
        for cache in decoder.kv_caches.values():
            for tensor in cache:
                tensor[returned] = 0

    server = Server(
        decoder,
        batch=BATCH,
        step=CapturedStep(decoder) if captured else None,
        swap=BlockSwap(decoder, 32) if swap else None,
        after_swap_in=spoil if zero else None,
    )
    requests = [Request(prompt) for prompt in prompts]
    server.generate(requests, tokens)
    return requests


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.generated for request in requests]


def assert_same(found: Sequence[Request], expected: Sequence[Request]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(
            torch.stack(one.logits), torch.stack(other.logits), rtol=0, atol=1e-4
        )


def dense_logits(decoder: PagedDecoder, tokens: Sequence[int]) -> torch.Tensor:
    """The model without a cache, written once more: all tokens at once, torch's own attention."""
    config = decoder.config
    weights = decoder.state_dict()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], eps=1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = config.head_dim // 2
        frequency = 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones(1), torch.arange(x.shape[-2])[:, None] * frequency)
        turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(-1, count, config.head_dim).transpose(0, 1)

    state = weights["embedding.weight"][torch.tensor(tokens)]
    for index in range(config.layers):
        own = f"layers.{index}."
        x = norm(state, own + "attention_norm.weight")
        query = rotate(heads(x @ weights[own + "query.weight"].t(), config.heads))
        key = rotate(heads(x @ weights[own + "key.weight"].t(), config.kv_heads))
        value = heads(x @ weights[own + "value.weight"].t(), config.kv_heads)
        groups = config.heads // config.kv_heads
        key, value = (t.repeat_interleave(groups, 0) for t in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + attended.transpose(0, 1).flatten(1) @ weights[own + "output.weight"].t()
        x = norm(state, own + "mlp_norm.weight")
        gate = F.silu(x @ weights[own + "gate.weight"].t())
        up = x @ weights[own + "up.weight"].t()
        state = state + (gate * up) @ weights[own + "down.weight"].t()
    return norm(state, "norm.weight") @ weights["head.weight"].t()


def test_the_paged_decoder_is_the_model_without_a_cache() -> None:
    (request,) = serve("cpu", prompts=PROMPTS[1:2], layers=3)
    decoder = PagedDecoder(DecoderConfig(layers=3), 1)
    tokens = [*request.prompt, *request.generated]
    expected = dense_logits(decoder, tokens)[len(request.prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(request.logits), expected, rtol=0, atol=1e-4)
    assert request.generated == expected.argmax(-1).tolist()


def test_requests_do_not_see_each_other() -> None:
    together = serve("cpu")
    for prompt, request in zip(PROMPTS, together):
        (alone,) = serve("cpu", prompts=[prompt])
        assert_same([request], [alone])


def test_swapping_changes_nothing_on_the_host() -> None:
    expected = serve("cpu")
    assert_same(serve("cpu", blocks=SCARCE, swap=True), expected)
    assert tokens_of(serve("cpu", blocks=SCARCE, swap=True, zero=True)) != tokens_of(expected)


@pytest.mark.npu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "npugraph"])
@pytest.mark.parametrize("layers", [2, 8])
def test_the_npu_gives_the_tokens_of_the_cpu(
    layers: int, captured: bool, npu: torch.device
) -> None:
    expected = serve("cpu", layers=layers)
    assert_same(serve("npu", layers=layers, captured=captured), expected)


@pytest.mark.npu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "npugraph"])
def test_swapping_blocks_between_steps_changes_no_token(
    captured: bool, sim: ModuleType, npu: torch.device
) -> None:
    expected = serve("cpu")
    sim.reset_stats()
    found = serve("npu", blocks=SCARCE, captured=captured, swap=True)
    assert_same(found, expected)
    if captured:
        steps = sim.stats().calls["aclmdlRIExecuteAsync"]
        # Two groups; the first token of a request comes from its prefill.
        assert steps == 2 * (TOKENS - 1), "every decode step is a replay"
    spoilt = serve("npu", blocks=SCARCE, captured=captured, swap=True, zero=True)
    assert tokens_of(spoilt) != tokens_of(expected), "the blocks that were moved are needed"


@pytest.mark.npu
def test_a_swap_moves_the_blocks_it_says_and_no_more(sim: ModuleType, npu: torch.device) -> None:
    config = DecoderConfig(layers=2)
    decoder = PagedDecoder(config, 6, device="npu")
    for cache in decoder.kv_caches.values():
        for tensor in cache:
            tensor.copy_(torch.rand(tensor.shape))
    before = {name: [t.cpu() for t in cache] for name, cache in decoder.kv_caches.items()}
    swap = BlockSwap(decoder, 4)
    torch.npu.synchronize()
    sim.reset_stats()
    taken = swap.out([1, 4])
    torch.npu.synchronize()
    payload = config.block_tokens * config.kv_heads * config.head_dim * 4
    assert sim.stats().bytes["d2h"] == 2 * config.layers * 2 * payload
    swap.back(taken, [5, 2])
    torch.npu.synchronize()
    assert sim.stats().bytes["h2d"] == 2 * config.layers * 2 * payload
    for name, cache in decoder.kv_caches.items():
        for tensor, old in zip(cache, before[name]):
            expected = old.clone()
            expected[5], expected[2] = old[1], old[4]
            assert torch.equal(tensor.cpu(), expected)


@pytest.mark.npu
def test_two_devices_serve_at_once(npu: torch.device) -> None:
    expected = serve("cpu")
    with torch.npu.device(1):
        second = serve("npu:1", blocks=SCARCE, swap=True)
    assert_same(second, expected)
    assert_same(serve("npu:0"), expected)


@pytest.mark.npu
@pytest.mark.parametrize("mode", ["npugraph_ex", "torchair"])
def test_compiled_decode_steps(mode: str, run_script: RunScript) -> None:
    result = run_script(
        f"""
        import sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        import paged_decoder
        from npu_kv_ops import simulator

        code = paged_decoder.main(["--mode", {mode!r}, "--layers", "2", "--tokens", "12"])
        print("replays", simulator.stats().calls["aclmdlRIExecuteAsync"])
        sys.exit(code)
        """,
        timeout=280,
    )
    lines = result.stdout.splitlines()
    assert [line[:4] for line in lines if "tokens" in line and "blocks)" in line] == ["ok  "] * 3
    assert int(lines[-1].split()[1]) >= 3 * 18


def test_the_example_says_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import paged_decoder

    from npu_kv_ops.testing import server

    original = server.swap_blocks_batch
    # A copy that forgets the last block of every call.
    monkeypatch.setattr(
        server,
        "swap_blocks_batch",
        lambda src, dst, a, b: original(src, dst, a[:-1], b[:-1]) if len(a) > 1 else None,
    )
    assert paged_decoder.main(["--mode", "eager", "--layers", "2"]) == 1
    assert "FAIL a pool that is too small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is no multiple of kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**sizes)


def test_what_does_not_fit_is_refused() -> None:
    config = DecoderConfig(layers=2)
    server = Server(PagedDecoder(config, 3), batch=2)
    with pytest.raises(ValueError, match="allowed are 1 to 128"):
        server.generate([Request([1] * 120)], 20)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        server.generate([Request([])], 1)
    with pytest.raises(MemoryError, match="2 blocks are free, 4 are needed"):
        server.generate([Request([1] * 50)], 8)
    decoder = PagedDecoder(config, 5)
    small = Server(decoder, batch=1, swap=BlockSwap(decoder, 1))
    with pytest.raises(MemoryError, match="1 host blocks are free"):
        small.generate([Request([1] * 40), Request([2] * 40)], 4)

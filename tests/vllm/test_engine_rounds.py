"""The real engine: the same prompts again and again, with far more blocks than the device has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from engine_process import EngineProcess, check_offloaded, connector

# Engines start slowly where other work keeps the cores busy.
pytestmark = pytest.mark.timeout(600)

PROMPTS = [tiny_llama.prompt(seed, 40 + seed * 53 % 260) for seed in range(24)]
DEVICE_BLOCKS = 19  # of the 20; one is never used
CHUNKED = {"max_num_batched_tokens": 64}
WHOLE = {"enable_chunked_prefill": False}

# Four requests that need 10 of the 19 blocks each before they are through.
GROWING = [tiny_llama.prompt(seed, 150) for seed in range(20, 24)]

SHAPES = {
    "mixed": {"prompts": PROMPTS, "max_tokens": 8, "rounds": 3},
    "growing": {"prompts": GROWING, "max_tokens": 150, "rounds": 2},
}


def request_for(checkpoint: Path, shape: str, engine: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"model": str(checkpoint), **engine}, **SHAPES[shape]}


def test_working_set_is_several_device_pools() -> None:
    blocks = sum(len(tokens) // tiny_llama.BLOCK_TOKENS for tokens in PROMPTS)
    assert blocks >= 3 * DEVICE_BLOCKS


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("engine", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("delay_ms", [0, 20], ids=["fast", "slow"])
def test_tokens_are_those_without_offloading(
    engines: EngineProcess, checkpoint: Path, engine: dict[str, Any], lazy: bool, delay_ms: int
) -> None:
    request = request_for(checkpoint, "mixed", engine)
    offload = connector(lazy_offload=lazy)
    run = engines.run("rounds", connector=offload, fault={"delay_ms": delay_ms}, **request)
    check_offloaded(run, engines.reference(**request))


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("engine", [WHOLE, CHUNKED], ids=["whole", "chunked"])
def test_loads_that_write_zeros_change_the_tokens(
    engines: EngineProcess, checkpoint: Path, engine: dict[str, Any], lazy: bool
) -> None:
    request = request_for(checkpoint, "mixed", engine)
    offload = connector(lazy_offload=lazy)
    run = engines.run("rounds", connector=offload, fault={"zero_loads": True}, **request)
    reference = engines.reference(**request)
    assert run.tokens[0] == reference.tokens[0]
    for number in range(1, 3):
        assert run.tokens[number] != reference.tokens[number]
    assert len(run.report.unequal()) == run.report.count("load") > 0


@pytest.mark.parametrize("delay_ms", [0, 30], ids=["fast", "slow"])
def test_preempted_requests_go_on_with_the_same_tokens(
    engines: EngineProcess, checkpoint: Path, delay_ms: int
) -> None:
    request = request_for(checkpoint, "growing", {})
    run = engines.run("rounds", connector=connector(), fault={"delay_ms": delay_ms}, **request)
    assert run.report.count("preemption") > 0
    check_offloaded(run, engines.reference(**request))


def test_preempted_requests_notice_loads_that_write_zeros(
    engines: EngineProcess, checkpoint: Path
) -> None:
    request = request_for(checkpoint, "growing", {})
    run = engines.run("rounds", connector=connector(), fault={"zero_loads": True}, **request)
    assert run.report.blocks("load") > 0
    assert run.tokens != engines.reference(**request).tokens


def test_engine_in_a_process_of_its_own(
    engines: EngineProcess, split_engines: EngineProcess, checkpoint: Path, tmp_path: Path
) -> None:
    request = request_for(checkpoint, "mixed", CHUNKED)
    reference = engines.reference(**request)
    zeros = str(tmp_path / "zeros")
    run = split_engines.run(
        "rounds_then_zeros",
        connector=connector(),
        fault={"delay_ms": 20, "zero_while": zeros},
        zeros=zeros,
        **request,
    )
    assert run.report.blocks("store") > 0
    assert run.report.blocks("load") > 0
    assert run.tokens == reference.tokens
    assert run.answer["control"] != reference.tokens[0]
    loads = run.report.of("load")
    before = run.answer["loads before control"]
    assert 0 < before < len(loads)
    assert [load["equal"] for load in loads] == [True] * before + [False] * (len(loads) - before)
    assert all(store["equal"] for store in run.report.of("store"))
    assert run.report.count("shutdown") == 1


def test_counts_go_through_the_statistics_of_vllm(engines: EngineProcess, checkpoint: Path) -> None:
    request = request_for(checkpoint, "mixed", CHUNKED)
    run = engines.run("rounds", connector=connector(), **request)
    metrics = run.answer["metrics"]
    assert metrics["vllm:simple_kv_offload_load_blocks"] == run.report.blocks("load") > 0

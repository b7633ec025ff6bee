"""Host pools at and below the smallest size, and configurations that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_llama
from engine_process import EngineProcess, connector

# Engines start slowly where other work keeps the cores busy.
pytestmark = pytest.mark.timeout(600)

# One block to offload, then requests that fill no block, which is not stored then, but together
# use all blocks of the device.
SMALL = [tiny_llama.prompt(1, 40)]
FILLERS = [tiny_llama.prompt(100 + number, 20) for number in range(19)]
BATCHES = [SMALL, FILLERS, SMALL, FILLERS, SMALL]


def test_host_pool_of_one_block(engines: EngineProcess, checkpoint: Path) -> None:
    # Block 0 of a pool is vLLM's null block, so two blocks hold one.
    engine = {"model": str(checkpoint), "max_num_seqs": 32}
    request = {"engine": engine, "batches": BATCHES, "max_tokens": 4}
    reference = engines.run("batches", **request)
    run = engines.run("batches", connector=connector(blocks=2), **request)
    assert run.report.blocks("store") == 1
    assert run.report.blocks("load") == 2
    assert run.report.unequal() == []
    assert run.tokens == reference.tokens

    control = engines.run(
        "batches", connector=connector(blocks=2), fault={"zero_loads": True}, **request
    )
    assert control.tokens != reference.tokens


def test_host_pool_of_the_null_block_alone(engines: EngineProcess, checkpoint: Path) -> None:
    engine = {"model": str(checkpoint)}
    prompts = [tiny_llama.prompt(seed, 200) for seed in range(4)]
    request = {"engine": engine, "prompts": prompts, "max_tokens": 8, "rounds": 2}
    run = engines.run("rounds", connector=connector(blocks=1), **request)
    assert run.report.blocks("store") == 0
    assert run.tokens == engines.reference(**request).tokens


def test_capacity_below_a_block_is_an_error(engines: EngineProcess, checkpoint: Path) -> None:
    offload = connector(cpu_bytes_to_use=tiny_llama.BLOCK_BYTES - 1, observed=False)
    run = engines.attempt(
        "rounds", engine={"model": str(checkpoint)}, connector=offload, prompts=[], rounds=0
    )
    assert "cpu_bytes_to_use" in run.error
    assert str(tiny_llama.BLOCK_BYTES - 1) in run.error
    assert str(tiny_llama.BLOCK_BYTES) in run.error


def test_unknown_option_is_an_error(engines: EngineProcess, checkpoint: Path) -> None:
    offload = connector(cpu_byte_to_use=1 << 20, observed=False)
    run = engines.attempt(
        "rounds", engine={"model": str(checkpoint)}, connector=offload, prompts=[], rounds=0
    )
    assert "'cpu_byte_to_use'" in run.error
    assert "cpu_bytes_to_use_per_rank" in run.error


def test_without_prefix_caching_nothing_is_offloaded(
    engines: EngineProcess, checkpoint: Path
) -> None:
    engine = {"model": str(checkpoint), "enable_prefix_caching": False}
    prompts = [tiny_llama.prompt(seed, 200) for seed in range(4)]
    request = {"engine": engine, "prompts": prompts, "max_tokens": 8, "rounds": 2}
    run = engines.run("rounds", connector=connector(), **request)
    assert [line for line in run.report.lines if line["kind"] != "preemption"] == []
    assert run.tokens == engines.reference(**request).tokens

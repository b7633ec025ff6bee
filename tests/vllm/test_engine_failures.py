"""Transfers that fail, and a copy thread that is gone: the engine goes on, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from engine_process import EngineProcess, Run, connector

# Engines start slowly where other work keeps the cores busy.
pytestmark = pytest.mark.timeout(600)

PROMPTS = [tiny_llama.prompt(seed, 100 + 20 * seed) for seed in range(8)]
WORK = {"prompts": PROMPTS, "max_tokens": 8, "rounds": 6}


def run_both(
    engines: EngineProcess, checkpoint: Path, policy: str, fault: dict[str, Any]
) -> tuple[Run, Run]:
    request: dict[str, Any] = {"engine": {"model": str(checkpoint)}, **WORK}
    run = engines.run("rounds", connector=connector(policy=policy), fault=fault, **request)
    return run, engines.reference(**request)


def wrong(run: Run, reference: Run) -> list[str]:
    """Return how the requests ended whose tokens are not those of the reference."""
    return [
        output["finish"]
        for output, expected in zip(run.outputs(), reference.outputs(), strict=True)
        if output["tokens"] != expected["tokens"]
    ]


def test_failed_loads_are_recomputed(engines: EngineProcess, checkpoint: Path) -> None:
    run, reference = run_both(engines, checkpoint, "recompute", {"fail_loads": 2})
    assert run.report.count("failed_load") == 2
    assert run.tokens == reference.tokens
    assert run.report.unequal() == []
    # Recomputed blocks are stored again, and come from the host in later rounds.
    assert run.report.blocks("load") > 0


def test_every_load_fails_and_is_recomputed(engines: EngineProcess, checkpoint: Path) -> None:
    run, reference = run_both(engines, checkpoint, "recompute", {"fail_loads": 1_000_000})
    # A block is loaded once for each time that it was stored: no load is tried again and again.
    failed, stored = run.report.blocks("failed_load"), run.report.blocks("store")
    assert 0 < failed <= stored
    assert run.tokens == reference.tokens


def test_failed_loads_fail_their_requests_alone(engines: EngineProcess, checkpoint: Path) -> None:
    run, reference = run_both(engines, checkpoint, "fail", {"fail_loads": 1})
    assert run.report.count("failed_load") == 1
    ended = wrong(run, reference)
    assert ended
    assert set(ended) == {"error"}
    assert run.tokens[2:] == reference.tokens[2:]
    assert run.report.blocks("load") > 0


def test_failed_stores_are_misses(engines: EngineProcess, checkpoint: Path) -> None:
    run, reference = run_both(engines, checkpoint, "fail", {"fail_stores": 2})
    assert run.report.count("failed_store") == 2
    assert run.tokens == reference.tokens
    assert run.report.unequal() == []
    assert run.report.blocks("load") > 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_engine_outlives_the_copy_thread(
    engines: EngineProcess, checkpoint: Path, policy: str
) -> None:
    run, reference = run_both(engines, checkpoint, policy, {"dead_after": 9})
    assert run.report.count("load") > 0
    assert run.report.count("load") + run.report.count("store") == 9
    # As above: a block that cannot be loaded is not tried again.
    assert 0 < run.report.blocks("refused_load") <= run.report.blocks("store")
    ended = wrong(run, reference)
    if policy == "recompute":
        assert ended == []
    else:
        assert ended
        assert set(ended) == {"error"}
        # Nothing is left in the host pool by then, and all is computed.
        assert run.tokens[-1] == reference.tokens[-1]

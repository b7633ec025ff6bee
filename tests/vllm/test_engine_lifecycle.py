"""Resets and shutdowns with transfers in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from engine_process import EngineProcess, connector

# Engines start slowly where other work keeps the cores busy.
pytestmark = pytest.mark.timeout(600)

PROMPTS = [tiny_llama.prompt(seed, 100) for seed in range(3)]
OTHERS = [tiny_llama.prompt(seed, 160) for seed in range(30, 34)]


def request_for(checkpoint: Path) -> dict[str, Any]:
    return {"engine": {"model": str(checkpoint)}, "prompts": PROMPTS, "max_tokens": 8}


def test_reset_with_transfers_in_flight(
    engines: EngineProcess, checkpoint: Path, tmp_path: Path
) -> None:
    request = request_for(checkpoint)
    gate = tmp_path / "gate"
    run = engines.run(
        "reset_in_flight",
        connector=connector(),
        fault={"hold": str(gate)},
        hold=str(gate),
        others=OTHERS,
        **request,
    )
    assert run.answer["resets"] == {
        "stores held": False,
        "stores done": True,
        "loads held": False,
        "loads done": True,
    }
    reference = engines.reference(rounds=1, **request).tokens[0]
    assert run.tokens == [reference] * 4
    assert run.report.unequal() == []
    cached = [[output["cached"] for output in each] for each in run.answer["rounds"]]
    assert cached == [[0, 0, 0], [0, 0, 0], [96, 96, 96], [0, 0, 0]]
    assert run.report.blocks("load") == 9


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_shutdown_with_transfers_in_flight(
    engines: EngineProcess, checkpoint: Path, tmp_path: Path, lazy: bool
) -> None:
    request = request_for(checkpoint)
    run = engines.run(
        "stop_in_transfer",
        connector=connector(lazy_offload=lazy),
        fault={"hold": str(tmp_path / "gate")},
        **request,
    )
    (shutdown,) = run.report.of("shutdown")
    assert shutdown["in_flight"] > 0
    assert run.answer["host_pools_alive"] == 0


def test_next_engine_of_the_process_offloads_again(
    engines: EngineProcess, checkpoint: Path
) -> None:
    request = request_for(checkpoint)
    reference = engines.reference(rounds=1, **request).tokens[0]
    run = engines.run(
        "batches",
        engine=request["engine"],
        connector=connector(),
        batches=[PROMPTS, OTHERS, PROMPTS],
        max_tokens=8,
    )
    assert [run.tokens[0], run.tokens[2]] == [reference, reference]
    assert run.report.blocks("load") > 0
    assert run.report.unequal() == []
    assert run.answer["host_pools_alive"] == 0

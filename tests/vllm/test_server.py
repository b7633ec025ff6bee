"""`vllm serve`, asked over HTTP by eight clients at a time, and stopped while it copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_llama
from engine_process import EngineProcess, connector
from server_process import Server

# Engines start slowly where other work keeps the cores busy.
pytestmark = pytest.mark.timeout(600)

PROMPTS = [tiny_llama.prompt(seed, 40 + seed * 37 % 220) for seed in range(25)]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "gate").touch()
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path) -> Iterator[Server]:
    """One server for the tests in their order, as it takes long to start; the last one stops it.

    Loads write zeros while the file ``zeros`` exists, and copies wait while ``gate`` does not.
    """
    server = Server(
        checkpoint,
        folder,
        connector=connector(),
        fault={"zero_while": str(folder / "zeros"), "hold": str(folder / "gate")},
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def expected(engines: EngineProcess, checkpoint: Path) -> list[list[int]]:
    """The tokens of each prompt from an engine without offloading."""
    run = engines.reference(
        engine={"model": str(checkpoint)}, prompts=PROMPTS, max_tokens=MAX_TOKENS, rounds=1
    )
    return run.tokens[0]


def test_two_hundred_streams(server: Server, expected: list[list[int]]) -> None:
    order = [number for _ in range(8) for number in range(len(PROMPTS))]
    random.Random(0).shuffle(order)
    answers = server.complete_all([PROMPTS[n] for n in order], MAX_TOKENS, at_a_time=8)
    assert len(answers) == 200
    assert answers == [expected[number] for number in order]
    report = server.report()
    assert report.blocks("load") > 0
    assert report.blocks("store") > 0
    assert report.unequal() == []


def test_metrics_page(server: Server) -> None:
    # Enough for every block to leave the device and come back.
    for _ in range(2):
        server.complete_all(PROMPTS, MAX_TOKENS, at_a_time=8)

    def wanted() -> dict[tuple[str, str], float]:
        report = server.report()
        numbers: dict[tuple[str, str], float] = {("queue_depth", ""): 0}
        for direction in ("load", "store"):
            blocks, transfers = report.blocks(direction), report.count(direction)
            numbers |= {
                ("blocks_total", direction): blocks,
                ("bytes_total", direction): blocks * tiny_llama.BLOCK_BYTES,
                ("transfers_total", direction): transfers,
                ("transfer_seconds_count", direction): transfers,
                ("failed_transfers_total", direction): 0,
            }
        return numbers

    def equal() -> bool:
        metrics = server.metrics()
        return all(
            metrics[f"vllm:npu_kv_offload_{name}", direction] == number
            for (name, direction), number in wanted().items()
        )

    # The last stores, and the statistics of the last steps, may come after the answers.
    server.wait_until(equal, "the metrics are those of the report")
    assert server.report().blocks("load") > 0
    assert server.report().blocks("store") > 0
    assert server.metrics()["vllm:external_prefix_cache_hits_total", ""] > 0


def test_loads_that_write_zeros_change_the_answers(
    server: Server, folder: Path, expected: list[list[int]]
) -> None:
    server.complete_all(PROMPTS, MAX_TOKENS, at_a_time=8)
    (folder / "zeros").touch()
    answers = server.complete_all(PROMPTS, MAX_TOKENS, at_a_time=8)
    (folder / "zeros").unlink()
    assert answers != expected


def test_stopped_in_mid_transfer(
    server: Server, folder: Path, engines: EngineProcess, checkpoint: Path
) -> None:
    prompt = tiny_llama.prompt(1000, 100)
    reference = engines.reference(
        engine={"model": str(checkpoint)}, prompts=[prompt], max_tokens=300, rounds=1
    )
    before = server.report().count("held")
    (folder / "gate").unlink()
    stream = server.stream(prompt, 300)
    tokens = next(stream)
    server.wait_until(lambda: server.report().count("held") > before, "a store in flight")
    server.ask_to_stop()
    (folder / "gate").touch()
    tokens += [token for chunk in stream for token in chunk]
    assert server.exit_code() == 0
    assert tokens == reference.tokens[0][0]
    report = server.report()
    assert report.count("shutdown") == 1
    # What was in flight has come to its end, like every transfer before.
    stores = {line["event"] for line in report.of("store")}
    assert {line["event"] for line in report.of("held")} <= stores

"""The benchmarks run, say what they promise to say, and fail where a target is missed.

No time is looked at: sizes are tiny, and what is checked is the report.
"""

from __future__ import annotations

import gc
import importlib
import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MACHINE = {"cpu", "cores", "kernel", "python", "torch", "torch_npu", "numpy"}
COMPARE = {">=": operator.ge, "<=": operator.le}


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def harness() -> ModuleType:
    return importlib.import_module("harness")


@pytest.fixture
def host_copy() -> Iterator[ModuleType]:
    import torch

    threads = torch.get_num_threads()
    yield importlib.import_module("host_copy")
    assert torch.get_num_threads() == threads


@pytest.fixture
def host_cost(sim: ModuleType) -> Iterator[ModuleType]:
    before = sim.settings()
    yield importlib.import_module("host_cost")
    assert sim.settings() == before


@pytest.fixture
def backend_cost(sim: ModuleType) -> Iterator[ModuleType]:
    import os
    import threading

    before = sim.settings(), os.sched_getaffinity(0), threading.active_count()
    yield importlib.import_module("backend_cost")
    assert (sim.settings(), os.sched_getaffinity(0), threading.active_count()) == before


@pytest.fixture
def graph_replay(sim: ModuleType) -> Iterator[ModuleType]:
    before = sim.settings()
    yield importlib.import_module("graph_replay")
    assert sim.settings() == before


@pytest.fixture
def pass_time(sim: ModuleType) -> Iterator[ModuleType]:
    before = sim.settings()
    yield importlib.import_module("pass_time")
    assert sim.settings() == before
    # The graphs of what was compiled live as long as that.
    import torch

    torch._dynamo.reset()
    gc.collect()


def _report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "settings", "rows", "targets"}
    assert set(report["machine"]) == MACHINE
    for target in report["targets"]:
        met = COMPARE[target["comparison"]](target["measured"], target["wanted"])
        assert target["met"] == met
    return report


def test_every_contestant_gets_every_turn_and_only_measured_rounds_count(
    harness: ModuleType,
) -> None:
    runs: list[str] = []
    settled: list[int] = []

    def contestant(name: str) -> Any:
        def run() -> dict[str, float]:
            runs.append(name)
            return {"call": float(runs.count(name)), "done": 0.0}

        return run

    names = ["a", "b", "c"]
    samples = harness.measure(
        {name: contestant(name) for name in names},
        rounds=5,
        warmup=1,
        repeat=2,
        settle=lambda: settled.append(len(runs)),
    )
    assert settled == list(range(len(runs)))
    assert len(runs) == (5 + 1) * 2 * 3
    turns = [runs[i : i + 2] for i in range(0, len(runs), 2)]
    assert all(first == second for first, second in turns)
    rounds = [[turn[0] for turn in turns[i : i + 3]] for i in range(0, len(turns), 3)]
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    # Runs 1 and 2 are the warm-up; of 3 and 4, 5 and 6, ... the last counts and the first is cold.
    for name in names:
        assert samples[name]["call"] == [4.0, 6.0, 8.0, 10.0, 12.0]
        assert samples[name]["call cold"] == [3.0, 5.0, 7.0, 9.0, 11.0]
    assert harness.medians(samples)["b"]["call"] == 8.0


@pytest.mark.parametrize(
    ("comparison", "measured", "met"),
    [(">=", 2.0, True), (">=", 1.9, False), ("<=", 2.0, True), ("<=", 2.1, False)],
)
@pytest.mark.parametrize("check", [True, False])
def test_check_fails_exactly_when_a_target_is_missed_and_names_it(
    harness: ModuleType,
    capsys: pytest.CaptureFixture[str],
    comparison: str,
    measured: float,
    met: bool,
    check: bool,
) -> None:
    report = harness.Report("some_benchmark", "a title", ["what"], {})
    report.targets += [
        harness.Target("the good one", 5.0, ">=", 1.0),
        harness.Target("the one in question", measured, comparison, 2.0),
    ]
    arguments = ["--check"] if check else []
    code = harness.finish(report, harness.argument_parser("", rounds=1).parse_args(arguments))
    assert code == (0 if met or not check else 1)
    printed = capsys.readouterr()
    assert "met: the good one" in printed.out
    assert ("MISSED: the one in question" in printed.out) == (not met)
    assert ("the one in question" in printed.err) == (check and not met)
    assert "the good one" not in printed.err


def test_host_copy(
    host_copy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "copy.json"
    sizes = ["--pool-mib", "2", "--copy-mib", "1", "--rounds", "1"]
    assert host_copy.main([*sizes, "--block-bytes", "4096", "65536", "--json", str(file)]) == 0
    report = _report(file)
    assert [row["block_bytes"] for row in report["rows"]] == [4096, 65536]
    for row in report["rows"]:
        assert set(row["bytes_per_second"]) == {"memcpy", "operator", "index_copy_", "gather+copy"}
        assert all(rate > 0 for rate in row["bytes_per_second"].values())
    # Small blocks have no target.
    assert [target["name"] for target in report["targets"]] == [
        "operator to memcpy, blocks of 64 KiB"
    ]
    assert "torch threads: 1" in capsys.readouterr().out


def test_host_copy_contestants_copy_what_they_say(host_copy: ModuleType) -> None:
    import torch

    block, count = 4096, 8
    for name in ("memcpy", "operator", "index_copy_", "gather+copy"):
        src = torch.arange(2 * count, dtype=torch.int8).repeat_interleave(block)
        dst = torch.full_like(src, -1)
        host_copy.contestants(src, dst, block, count * block)[name]()
        # Every block is a copy of one block of the source, and as many were written as asked for.
        written = dst.view(-1, block)[(dst.view(-1, block) != -1).any(dim=1)]
        assert (written == written[:, :1]).all(), name
        assert len(written.unique()) == len(written) == count, name


def test_host_copy_check_fails_on_a_target_out_of_reach(
    host_copy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_copy, "TARGET", float("inf"))
    sizes = ["--pool-mib", "2", "--copy-mib", "1", "--rounds", "1", "--block-bytes", "65536"]
    assert host_copy.main([*sizes, "--check"]) == 1
    assert "blocks of 64 KiB" in capsys.readouterr().err
    monkeypatch.setattr(host_copy, "TARGET", 0.0)
    assert host_copy.main([*sizes, "--check"]) == 0


@pytest.mark.parametrize("wrong", ["3000", "12"])
def test_host_copy_refuses_blocks_that_do_not_fit(host_copy: ModuleType, wrong: str) -> None:
    with pytest.raises(SystemExit) as stop:
        host_copy.main(["--copy-mib", "1", "--block-bytes", wrong])
    assert stop.value.code == 2


def test_host_cost(
    host_cost: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    arguments = ["--shapes", "3x4", "2x8", "--block-bytes", "512", "--rounds", "1"]
    assert host_cost.main([*arguments, "--json", str(file)]) == 0
    report = _report(file)
    assert report["settings"]["runtime"] == "sim"
    assert [(row["tensors"], row["blocks"], row["ids"]) for row in report["rows"]] == [
        (3, 4, "scattered"),
        (3, 4, "consecutive"),
        (2, 8, "scattered"),
        (2, 8, "consecutive"),
    ]
    for row in report["rows"]:
        blocks = row["tensors"] * row["blocks"]
        merged = row["tensors"] if row["ids"] == "consecutive" else None
        for name in ("operator", "numpy", "numpy+.ptrs", "C loop"):
            assert set(row["seconds"][name]) == {"call", "issued", "call cold", "issued cold"}
            if name != "operator":
                assert row["copies"][name] == blocks
        assert merged is None or row["copies"]["operator"] == merged
    printed = capsys.readouterr().out
    assert "no NPU took part" in printed
    assert "operator to C loop, 3x4 scattered, time until issued" in printed


def test_host_cost_check_fails_on_a_target_out_of_reach(
    host_cost: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_cost, "TARGET_SHAPE", "2x4")
    monkeypatch.setattr(host_cost, "TARGET_C_LOOP", float("inf"))
    arguments = ["--shapes", "2x4", "--block-bytes", "512", "--rounds", "1", "--check"]
    monkeypatch.setattr(host_cost, "TARGETS_NUMPY", {"scattered": 0.0, "consecutive": 0.0})
    assert host_cost.main(arguments) == 0
    monkeypatch.setattr(host_cost, "TARGETS_NUMPY", {"scattered": 0.0, "consecutive": 1e9})
    assert host_cost.main(arguments) == 1
    missed = capsys.readouterr().err
    assert "numpy to operator, 2x4 consecutive" in missed
    assert "scattered" not in missed


def test_host_cost_notices_a_contestant_that_does_less(host_cost: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="idle copied 0 bytes instead of 512"):
        host_cost.check_same_work({"idle": dict}, 512)


@pytest.mark.parametrize("wrong", ["64", "0x4", "4x", "ax4"])
def test_host_cost_refuses_a_shape_that_is_none(host_cost: ModuleType, wrong: str) -> None:
    with pytest.raises(SystemExit) as stop:
        host_cost.main(["--shapes", wrong])
    assert stop.value.code == 2


def test_backend_cost(
    backend_cost: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "backend.json"
    assert backend_cost.main(["--quick", "--json", str(file)]) == 0
    report = _report(file)
    assert report["settings"]["runtime"] == "sim"
    rows = {
        part: [row for row in report["rows"] if row["part"] == part]
        for part in ("launch", "loop", "start", "behind")
    }
    assert [(row["blocks"], row["ids"]) for row in rows["launch"]] == [(16, "list"), (16, "array")]
    assert [row["caller"] for row in rows["start"]] == ["sleeps", "computes"]
    for row in [*rows["launch"], *rows["start"]]:
        for seconds in row["seconds"].values():
            assert all(value > 0 for value in seconds.values())
    for row in rows["start"]:
        for name in ("backend", "Python thread"):
            seconds = row["seconds"][name]
            assert set(seconds) == {"called_p50", "called_p99", "issued_p50", "issued_p99"}
            assert seconds["called_p50"] <= seconds["issued_p50"]
    assert set(rows["loop"][0]["seconds"]) == {"idle", "busy process", "backend", "Python thread"}
    # Counted, not timed: of the store held in its first runtime call, that one step was issued.
    held = next(row for row in rows["behind"] if row["how"] == "held")
    assert held["store_copies"] == 65536
    assert held["share"] == held["highest_share"] == {"backend": 2048 / 65536, "Python thread": 1.0}
    targets = {target["name"]: target for target in report["targets"]}
    assert targets["share of the store issued before the load, held"]["met"]
    assert len(targets) == 7
    assert "no NPU took part" in capsys.readouterr().out


def test_backend_cost_check_fails_on_a_target_out_of_reach(
    backend_cost: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--parts", "behind", "--check"]
    # The share is exactly a 32nd when held, and no more than everything when free.
    monkeypatch.setattr(backend_cost, "BEHIND_SHARE", 1.0)
    assert backend_cost.main(arguments) == 0
    monkeypatch.setattr(backend_cost, "BEHIND_SHARE", 1 / 33)
    assert backend_cost.main(arguments) == 1
    assert "share of the store issued before the load, held" in capsys.readouterr().err


def test_backend_cost_notices_a_backend_that_does_less(backend_cost: ModuleType) -> None:
    class Idle:
        def launch_copy(self, *job: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

    import torch

    streams = backend_cost.Streams(torch.npu.Stream(), torch.npu.Stream())
    with pytest.raises(RuntimeError, match="0 copies d2h instead of 65536"):
        backend_cost.store_and_load(Idle(), streams, 512, held=False)


def test_backend_cost_counts_what_was_issued_before_the_load(backend_cost: ModuleType) -> None:
    from types import SimpleNamespace

    from npu_kv_ops.simulator import TaskRecord

    streams = backend_cost.Streams(SimpleNamespace(npu_stream=1), SimpleNamespace(npu_stream=2))
    quarter = backend_cost.STORE_COPIES * 512 // 4
    tasks = [
        *(TaskRecord(0, 2, "batch", quarter, start, start) for start in (10, 20, 40, 50)),
        TaskRecord(0, 1, "record", 0, 5, 5),
        *(TaskRecord(0, 1, "batch", 1, start, start) for start in (30, 60)),
    ]
    assert backend_cost.share_before_load(tasks, streams, 512) == 0.5
    with pytest.raises(RuntimeError, match="the store has"):
        backend_cost.share_before_load(tasks[1:], streams, 512)


def test_graph_replay(
    graph_replay: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "replay.json"
    assert graph_replay.main(["--quick", "--json", str(file)]) == 0
    report = _report(file)
    assert report["settings"]["runtime"] == "sim"
    start, host, capture = report["rows"]
    assert [row["part"] for row in report["rows"]] == ["start", "host", "capture"]
    alone, queued = start["seconds"]["one at a time"], start["seconds"]["back to back"]
    assert set(alone) == {"to callback", "callback to copy", "to copy", "through"}
    assert set(queued) == {"to callback", "through"}
    for times in (*alone.values(), *queued.values()):
        assert 0 < times["p50"] <= times["p99"]
    for share in ("p50", "p99"):
        parts = alone["to callback"][share] + alone["callback to copy"][share]
        assert alone["to copy"][share] == pytest.approx(parts)
    assert set(host["seconds"]) == {
        *("replay", "graph of one operator", "eager, NPU ids", "eager, CPU ids"),
    }
    for seconds in host["seconds"].values():
        assert 0 < seconds["call"] <= seconds["done"]
    for seconds in capture["seconds"].values():
        assert set(seconds) == {"captures", "compiles"}
    (target,) = report["targets"]
    assert target["name"] == "stream at the swap to first copy, 2x3, p50, us"
    assert target["measured"] == pytest.approx(alone["to copy"]["p50"] * 1e6)
    assert "no NPU took part" in capsys.readouterr().out


def test_graph_replay_check_fails_on_a_target_out_of_reach(
    graph_replay: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--parts", "start", "--check"]
    monkeypatch.setattr(graph_replay, "START_US", float("inf"))
    assert graph_replay.main(arguments) == 0
    monkeypatch.setattr(graph_replay, "START_US", 0.0)
    assert graph_replay.main(arguments) == 1
    assert "stream at the swap to first copy" in capsys.readouterr().err


def test_graph_replay_notices_a_contestant_that_does_less(graph_replay: ModuleType) -> None:
    load = graph_replay.Load(2, 3, 512)
    with pytest.raises(RuntimeError, match=r"idle copied \(0, 0\) .* instead of \(3072, 6\)"):
        graph_replay.check_same_work({"idle": dict}, load)


def test_graph_replay_notices_a_stamp_that_is_missing(graph_replay: ModuleType) -> None:
    stamp = graph_replay.Stamp(graph_replay.build_bare_runtime(), 4)
    graph = graph_replay.captured(stamp.put_on_stream)
    import torch

    for _ in range(2):
        graph.replay()
    torch.npu.synchronize()
    first, second = stamp.times(2)
    assert 0 < first <= second
    with pytest.raises(RuntimeError, match="2 stamps instead of 3"):
        stamp.times(3)


@pytest.mark.parametrize("wrong", ["64", "0x4"])
def test_graph_replay_refuses_a_shape_that_is_none(graph_replay: ModuleType, wrong: str) -> None:
    for option in ("--shapes", "--start-shape"):
        with pytest.raises(SystemExit) as stop:
            graph_replay.main([option, wrong])
        assert stop.value.code == 2


def test_pass_time(
    pass_time: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "passes.json"
    arguments = ["--swaps", "2", "1", "4", "--rounds", "1", "--json", str(file)]
    assert pass_time.main(arguments) == 0
    report = _report(file)
    assert report["settings"] == {"additions": 22, "rounds": 1, "runtime": "sim"}
    # On top of the layers: two vectors, the ids, the output.
    assert [(row["storages"], row["swaps"], row["nodes"]) for row in report["rows"]] == [
        ("each its own", 1, 31 + 4),
        ("each its own", 2, 2 * 31 + 4),
        ("each its own", 4, 4 * 31 + 4),
        ("one for all", 2, 2 * 31 + 4),
    ]
    for row in report["rows"]:
        (compile_seconds,), (passes,) = row["seconds"]["compile"], row["seconds"]["passes"]
        assert 0 < passes < compile_seconds
    *shares, growth = report["targets"]
    for target, row in zip(shares, (report["rows"][1], report["rows"][3]), strict=True):
        assert target["name"].startswith(f"{row['nodes']} nodes, 2 swaps, storages ")
        seconds = row["seconds"]
        share = 100 * seconds["passes"][0] / seconds["compile"][0]
        assert target["measured"] == pytest.approx(share)
    small, _, large, _ = (row["seconds"]["passes"][0] / row["nodes"] for row in report["rows"])
    assert growth["measured"] == pytest.approx(large / small)
    assert "no NPU took part" in capsys.readouterr().out


def test_pass_time_check_fails_on_a_target_out_of_reach(
    pass_time: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--swaps", "1", "--rounds", "1", "--check"]
    monkeypatch.setattr(pass_time, "SHARE", 100.0)  # of one size there is no growth: it is 1
    assert pass_time.main(arguments) == 0
    monkeypatch.setattr(pass_time, "GROWTH", 0.5)
    assert pass_time.main(arguments) == 1
    missed = capsys.readouterr().err
    assert "time per node" in missed
    assert "per cent" not in missed


def test_pass_time_notices_passes_that_do_less(
    pass_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_KV_DISABLE_PASSES", "reinplace")
    with pytest.raises(RuntimeError, match="2 swaps in 1 graphs"):
        pass_time.compilation(2, pass_time.SEPARATE, set())


def test_pass_time_knows_pools_in_one_storage(pass_time: ModuleType) -> None:
    for storages, number in ((pass_time.SEPARATE, 3), (pass_time.SHARED, 1)):
        for side in zip(*pass_time.Model(3, storages).pools, strict=True):
            assert len({pool.untyped_storage().data_ptr() for pool in side}) == number
            assert len({pool.data_ptr() for pool in side}) == 3


@pytest.mark.npu
@pytest.mark.timeout(600)
def test_what_the_passes_promise_holds_on_the_virtual_clock(tmp_path: Path) -> None:
    """Exact on every machine: see the targets of benchmarks/overlap.py."""
    written = tmp_path / "overlap.json"
    sizes = ["--layers", "32", "--pairs", "48", "--payload", "256"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "overlap.py", "--check", "--json", written, *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = _report(written)
    rows = {(row["layer"], row["ratio"]): row for row in report["rows"]}
    assert len(rows) == 12
    for (layer, ratio), row in rows.items():
        ways = 2 if layer == "load and store" else 1
        compute, transfer = row["compute_ns"], row["transfer_ns"]
        assert compute == pytest.approx(transfer / ratio)
        assert row["makespan_ns_without"] >= compute + ways * transfer
        one_layer = (compute + ways * transfer) / 32
        assert row["makespan_ns_with"] <= 1.05 * max(compute, transfer) + one_layer
        assert row["calls_with"] <= row["calls_without"]
    for ratio in (0.25, 1, 4):
        assert rows["load", ratio]["callbacks_without"] == 32
        assert rows["load", ratio]["callbacks_with"] == 1
        beside = rows["load keys, values", ratio]
        assert (beside["callbacks_without"], beside["callbacks_with"]) == (64, 1)
        assert 2 * beside["copies_with"] == beside["copies_without"]

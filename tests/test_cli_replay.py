import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_kv_ops.cli import main
from npu_kv_ops.replay.engine import Replay

ROOT = Path(__file__).resolve().parent.parent
CLI = """
import sys
from npu_kv_ops.cli import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = ("--model", "llama-3.1-8b", "--shrink", "4096")
JSON_KEYS = {
    "requests",
    "device_hits",
    "host_hits",
    "misses",
    "stores",
    "loads",
    "h2d_bytes",
    "d2h_bytes",
    "copies_before",
    "copies_after",
    "call_us_p50",
    "call_us_p99",
    "mismatches",
    "runtime",
    "seconds",
    "scheduler",
}


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch, process_runtime: str) -> Callable[..., int]:
    """`npu-kv replay` in this process, on its runtime."""
    monkeypatch.setenv("NPU_KV_RUNTIME", process_runtime)
    return lambda *arguments: main(["replay", *map(str, arguments)])


def write_trace(path: Path, *hash_ids: tuple[int, ...]) -> Path:
    records: list[dict[str, Any]] = [
        {
            "timestamp": 10 * i,
            "input_length": 512 * len(ids),
            "output_length": 1,
            "hash_ids": list(ids),
        }
        for i, ids in enumerate(hash_ids)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_results_go_to_the_table_json_and_plot(
    replay: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    process_runtime: str,
) -> None:
    results, plot = tmp_path / "out.json", tmp_path / "out.png"
    code = replay("--synthetic", 40, "--seed", 2, *SMALL, "--json", results, "--plot", plot)
    found = json.loads(results.read_text())
    assert code == 0
    assert set(found) == JSON_KEYS
    assert (found["requests"], found["mismatches"]) == (40, 0)
    assert min(found["device_hits"], found["host_hits"], found["misses"]) > 0
    assert found["runtime"] == process_runtime
    assert plot.read_bytes().startswith(b"\x89PNG")

    out = capsys.readouterr().out
    assert "device pool" in out
    assert "chosen here" in out
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in out.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert rows["requests"] == "40"
    assert rows["mismatches"] == "0"
    assert rows["copies before coalescing"] == f"{found['copies_before']:,}"
    assert rows["stores"].startswith(f"{found['stores']:,} blocks")
    for name in ("device hits", "host hits", "misses", "loads", "calls", "seconds"):
        assert name in rows
    for name in ("copies after coalescing", "host time per call", "bytes per second"):
        assert name in rows
    loads, stores = found["scheduler"]["loads"], found["scheduler"]["stores"]
    depths = f"{loads['peak_depth']} loads, {stores['peak_depth']} stores"
    assert rows["queue depth at most"] == depths
    assert rows["held for hazards"] == f"{loads['hazards']} loads, {stores['hazards']} stores"
    for name, lane in (("loads", loads), ("stores", stores)):
        for what, key in (("launch to start", "launch"), ("start to done", "completion")):
            p50, p99 = (lane[f"{key}_us_{quantile}"] for quantile in ("p50", "p99"))
            assert rows[f"{name}: {what}"] == f"p50 {p50:,.1f} us, p99 {p99:,.1f} us"
    assert rows["failures"] == "0"


def test_both_backends_serve_the_same_requests(
    replay: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "out.json"
    found = {}
    for backend in ("eager", "scheduler"):
        arguments = ("--synthetic", 30, *SMALL, "--backend", backend, "--json", results)
        assert replay(*arguments) == 0
        found[backend] = json.loads(results.read_text())
        out = capsys.readouterr().out
        assert f"backend      {backend}, up to 2 requests ahead" in out
        assert ("queue depth at most" in out) is (backend == "scheduler")
    counts = ("host_hits", "loads", "stores", "h2d_bytes", "d2h_bytes")
    for key in (*counts, "copies_before", "copies_after", "mismatches"):
        assert found["eager"][key] == found["scheduler"][key]
    assert found["eager"]["scheduler"] is None


def test_a_run_without_loads_has_no_times_of_them(
    replay: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(write_trace(tmp_path / "t.jsonl", (0,), (1,)), *SMALL) == 0
    out = capsys.readouterr().out
    assert re.search(r"loads: start to done *│ *- │", out)
    assert re.search(r"stores: start to done *│ *p50 ", out)


def test_the_runtime_is_said_plainly(
    replay: Callable[..., int], capsys: pytest.CaptureFixture[str], process_runtime: str
) -> None:
    assert replay("--synthetic", 2, *SMALL) == 0
    expected = {
        "sim": "SIMULATED",
        "host": "host memory alone",
        "cann": "a real NPU",
    }[process_runtime]
    assert expected in capsys.readouterr().out


def test_pools_policy_blocks_and_requests_can_be_chosen(
    replay: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", (0, 1), (2, 3), (0, 1), (2, 3))
    results = tmp_path / "out.json"
    arguments = (trace, *SMALL, "--block-tokens", 256, "--device-blocks", 5, "--host-blocks", 20)
    assert replay(*arguments, "--requests", 3, "--policy", "lazy", "--json", results) == 0
    found = json.loads(results.read_text())
    # Lazily, a block is stored when it leaves the device: 4 blocks for each new prompt, 5 at most.
    assert (found["requests"], found["misses"], found["host_hits"]) == (3, 8, 4)
    assert (found["loads"], found["stores"]) == (4, 8)
    assert replay(*arguments, "--policy", "eager", "--json", results) == 0
    found = json.loads(results.read_text())
    assert (found["requests"], found["misses"], found["host_hits"]) == (4, 8, 8)
    assert found["stores"] == 8
    out = capsys.readouterr().out
    assert "5 blocks" in out
    assert "20 blocks" in out
    assert "chosen here" not in out


def test_deepseek_keeps_two_tensors_of_different_size(
    replay: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("--synthetic", 10, "--model", "deepseek-v3", "--shrink", 2048) == 0
    assert "latent and rope (122 tensors)" in capsys.readouterr().out


def test_wrong_blocks_make_the_exit_code_1_and_are_named(
    replay: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Replay._start

    def corrupting_start(self: Replay, *arguments: Any) -> Any:
        if self.totals.requests == 2:
            self._mover.synchronize()
            self.host_tensors[0][self.cache.host[(1, 2)], 3] ^= 16
        return start(self, *arguments)

    monkeypatch.setattr(Replay, "_start", corrupting_start)
    trace = write_trace(tmp_path / "t.jsonl", (0, 1), (2, 3), (0, 1))
    results = tmp_path / "out.json"
    code = replay(trace, *SMALL, "--device-blocks", 9, "--host-blocks", 40, "--json", results)
    assert code == 1
    assert json.loads(results.read_text())["mismatches"] == 3
    out = capsys.readouterr().out
    assert "request 3 (line 3): hash id 1 part 3/4, layer 0, key: first wrong byte 3" in out


def test_a_failing_copy_shows_the_table_so_far(
    replay: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = Replay._serve

    def failing_serve(self: Replay, *arguments: Any) -> None:
        if self.totals.requests == 2:
            raise RuntimeError("the link is down")
        serve(self, *arguments)

    monkeypatch.setattr(Replay, "_serve", failing_serve)
    trace = write_trace(tmp_path / "t.jsonl", (0, 1), (2, 3), (0, 1))
    assert replay(trace, *SMALL) == 1
    captured = capsys.readouterr()
    assert "2 of 3" in captured.out
    assert "failed after 2 of 3 requests: RuntimeError: the link is down" in captured.err


def test_a_broken_line_stops_before_anything_runs(
    replay: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Replay, "__init__", lambda *_, **__: pytest.fail("the replay began"))
    trace = write_trace(tmp_path / "t.jsonl", (0, 1), (2, 3))
    with trace.open("a") as file:
        file.write('{"timestamp": 1, "input_length": 3, "output_length": 0, "hash_ids": []}\n')
    assert replay(trace, "--requests", 1) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "t.jsonl, line 3: 'hash_ids' has 0 entries" in captured.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give either TRACE or --synthetic"),
        (("t.jsonl", "--synthetic", "3"), "give either TRACE or --synthetic"),
        (("missing.jsonl",), "missing.jsonl: No such file or directory"),
        ((".",), "Is a directory"),
        (("--synthetic", "0"), "0 is too small"),
        (("--synthetic", "x"), "'x' is not a whole number"),
        (("--synthetic", "3", "--seed", "-1"), "-1 is too small"),
        (("--synthetic", "3", "--block-tokens", "100"), "must divide 512"),
        (("--synthetic", "3", "--device-blocks", "0"), "0 is too small"),
        (("--synthetic", "3", "--host-blocks", "-5"), "-5 is too small"),
        (("--synthetic", "3", "--shrink", "0"), "0 is too small"),
        (("--synthetic", "3", "--requests", "0"), "0 is too small"),
        (("--synthetic", str(10**12)), "1000000000000 is too large, it must be 1000000 or less"),
        (("--synthetic", "3", "--block-tokens", str(512 * 10**9)), "is too large"),
        (("--synthetic", "3", "--device-blocks", str(2**31)), "it must be 2147483647 or less"),
        (("--synthetic", "3", "--host-blocks", str(10**30)), "it must be 2147483647 or less"),
        (("--synthetic", "3", "--shrink", str(10**30)), "it must be 2147483647 or less"),
        (("--synthetic", "3", "--speed", "0"), "0 is not a finite number above 0"),
        (("--synthetic", "3", "--speed", "inf"), "inf is not a finite number above 0"),
        (("--synthetic", "3", "--speed", "fast"), "'fast' is not a number"),
        (("--synthetic", "3", "--policy", "never"), "invalid choice: 'never'"),
        (("--synthetic", "3", "--backend", "thread"), "invalid choice: 'thread'"),
        (("--synthetic", "3", "--ahead", "-1"), "-1 is too small"),
        (("--synthetic", "3", "--verify", "some"), "invalid choice: 'some'"),
        (("--synthetic", "3", "--runtime", "gpu"), "invalid choice: 'gpu'"),
        (("--synthetic", "3", "--model", "gpt-9"), "'gpt-9' is neither a file nor"),
        (("--synthetic", "3", "--json", "no/such/out.json"), "not a file in a folder that exists"),
        (("--synthetic", "3", "--json", "."), "not a file in a folder that exists"),
        (("--synthetic", "3", "--plot", "no/such/out.png"), "not a file in a folder that exists"),
        (("--synthetic", "3", "--plot", "out.gif"), "must end in .png"),
        (("--synthetic", "3", "--device-blocks", "2"), "need more than 2 device blocks"),
    ],
)
def test_usage_errors(
    replay: Callable[..., int],
    arguments: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "t.jsonl", (0,))
    assert replay(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err


def test_pools_that_do_not_fit_say_what_to_change(
    replay: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("--synthetic", 3, "--shrink", 1, "--host-blocks", 10**9) == 2
    assert "raise --shrink, or lower the number of blocks" in capsys.readouterr().err


def test_a_request_that_no_pool_can_hold_is_named(
    replay: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    record = {"timestamp": 0, "input_length": 512, "output_length": 10**18, "hash_ids": [0]}
    trace.write_text(json.dumps(record))
    assert replay(trace) == 2
    errors = capsys.readouterr().err
    assert "the largest request, line 1, needs 7812500000000004 device blocks" in errors
    assert "or raise --block-tokens" in errors


@pytest.mark.parametrize(
    ("hash_ids", "arguments", "reason"),
    [
        (((0,), (1,)), ("--block-tokens", 1024), "no prompt fills a block of 1024 tokens"),
        (((0,), (0,)), ("--policy", "lazy"), "the device pool held every block"),
        (((0,), (1,)), ("--policy", "lazy", "--device-blocks", 5), None),
        (((0,),), (), None),
    ],
)
def test_a_run_in_which_nothing_moves_says_so(
    replay: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    hash_ids: tuple[tuple[int, ...], ...],
    arguments: tuple[Any, ...],
    reason: str | None,
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", *hash_ids)
    assert replay(trace, *SMALL, *arguments) == 0
    remark = f"no block moved between the pools: {reason or ''}"
    assert (remark in capsys.readouterr().out) is (reason is not None)


def test_pinned_memory_that_cannot_be_had_is_no_traceback(
    replay: Callable[..., int], sim: Any, npu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sim.configure(pinned_memory_bytes=1 << 20)
    assert replay("--synthetic", 3, "--shrink", 64) == 1
    assert "no memory for the pools" in capsys.readouterr().err


def test_usage_is_checked_without_importing_torch(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None\n{CLI}"
    for arguments in (["--help"], ["replay", "--help"], ["replay", str(tmp_path / "none.jsonl")]):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
        assert result.returncode == (0 if "--help" in arguments else 2), result.stderr
        assert "Traceback" not in result.stderr


def test_the_host_runtime_needs_no_npu(run_script: Callable[..., Any]) -> None:
    result = run_script(
        CLI, runtime=None, args=["replay", "--runtime", "host", "--synthetic", "5", *SMALL]
    )
    assert "no NPU is used" in result.stdout
    assert "simulated" not in (result.stdout + result.stderr).lower()


def test_auto_takes_the_simulator_only_without_cann(
    run_script: Callable[..., Any], sim: Any, no_cann: None
) -> None:
    result = run_script(CLI, runtime=None, args=["replay", "--synthetic", "5", *SMALL])
    assert "sim: the SIMULATED NPU" in result.stdout


def test_cann_is_not_replaced_by_anything_else(
    replay: Callable[..., int], no_cann: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("--synthetic", 5, "--runtime", "cann") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no CANN was found: run its set_env.sh" in captured.err


def test_ctrl_c_prints_the_table_so_far(tmp_path: Path, process_runtime: str) -> None:
    results = tmp_path / "out.json"
    arguments = ["replay", "--synthetic", "60", "--speed", "1", *SMALL, "--json", str(results)]
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NPU_KV_RUNTIME": process_runtime, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        head = ""
        while not head.endswith("policy       eager\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            head += line
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "of 60 " in out
    assert "mismatches" in out
    assert "interrupted after" in errors
    assert "Traceback" not in errors
    assert json.loads(results.read_text())["requests"] < 60

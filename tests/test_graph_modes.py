"""The operator in every graph mode, each in a process of its own: some modes cannot share one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

HERE = Path(__file__).parent
ON_NPU = ["npugraph", "make_graphed_callables", "npugraph_ex", "torchair"]
ON_CPU = ["aot_eager", "inductor"]
SECONDS = 600

COMMON = {
    *(f"{way} {dtype}" for way in ("load", "store") for dtype in ("int32", "int64")),
    *(f"views of one input, {way}" for way in ("load", "store")),
    *(f"one storage, {way}" for way in ("load", "store")),
    "several calls",
    "split by hand",
    "made in the graph",
    "a clone as source",
}
BY_HOW_POOLS_ARRIVE = {"global pools, load", "global pools, store", "module attributes, store"}


def scenarios(
    run_script: RunScript, runner: str, mode: str, runtime: str
) -> list[dict[str, object]]:
    code = (HERE / runner).read_text()
    done = run_script(code, runtime=runtime, args=[mode], timeout=SECONDS)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(SECONDS)
@pytest.mark.npu
@pytest.mark.parametrize(
    "mode",
    [
        "npugraph",
        "make_graphed_callables",
        "npugraph_ex static",
        "npugraph_ex dynamic",
        "torchair",
    ],
)
def test_a_mode_on_the_npu(run_script: RunScript, mode: str) -> None:
    found = {
        entry["scenario"]: entry
        for entry in scenarios(run_script, "graph_mode_runner.py", mode, "sim")
    }
    wanted = COMMON | {"CPU ids"}
    if mode != "torchair":
        wanted.add("a side stream")
    if mode in ("npugraph_ex static", "npugraph_ex dynamic", "torchair"):
        wanted |= BY_HOW_POOLS_ARRIVE
    assert set(found) == wanted
    assert found["load int64"]["replays"] == 100
    assert found["a clone as source"]["outcome"] in ("right", "error")


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("mode", ON_CPU)
def test_a_mode_on_the_cpu(run_script: RunScript, mode: str) -> None:
    found = {
        entry["scenario"] for entry in scenarios(run_script, "graph_mode_runner.py", mode, "host")
    }
    assert found == COMMON | BY_HOW_POOLS_ARRIVE


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("mode", "runtime"),
    [
        *(pytest.param(mode, "sim", marks=pytest.mark.npu) for mode in ON_NPU),
        *((mode, "host") for mode in ON_CPU),
    ],
)
def test_the_decoder_with_its_swaps_in_the_graph(
    run_script: RunScript, mode: str, runtime: str
) -> None:
    found = {
        (entry["per_layer"], entry["passes"]): entry
        for entry in scenarios(run_script, "graph_decoder_runner.py", mode, runtime)
    }
    passes = (False,) if mode in ("npugraph", "make_graphed_callables") else (False, True)
    assert set(found) == {(per_layer, each) for per_layer in (False, True) for each in passes}
    if runtime == "sim" and True in passes:
        layers = {each: found[True, each] for each in passes}
        assert layers[True]["virtual_ns"] < layers[False]["virtual_ns"]


@pytest.mark.npu
def test_a_ge_graph_says_what_to_use_instead(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch, torchair
        import npu_kv_ops.ops

        src, dst = torch.zeros(4, 8).pin_memory(), torch.zeros(4, 8, device="npu")
        ids = torch.zeros(1, dtype=torch.int64, device="npu")

        def function(ids):
            torch.ops.npu_kv.swap_blocks_batch([src], [dst], ids, ids)
            return ids + 1

        config = torchair.CompilerConfig()
        config.mode = "max-autotune"
        backend = torchair.get_npu_backend(compiler_config=config)
        try:
            torch.compile(function, backend=backend, fullgraph=True)(ids)
        except Exception as error:
            print("refused:", error)

        # What torchair would run if this package had not recognised it.
        overload = torch.ops.npu_kv.swap_blocks_batch.static
        try:
            overload._ge_converter([src], [dst], [0], [0])
        except Exception as error:
            print("converter:", error)
        """
    )
    assert re.search(
        r"refused:.*default cannot be part of a GE graph.*npugraph_ex", done.stdout, re.S
    )
    assert re.search(r"converter:.*static cannot be part of a GE graph", done.stdout, re.S)


@pytest.mark.npu
@pytest.mark.parametrize("compiler", ["npugraph_ex", "torchair"])
def test_cpu_ids_stop_the_compile_and_break_nothing(run_script: RunScript, compiler: str) -> None:
    done = run_script(
        """
        import sys, torch
        import npu_kv_ops.ops

        backend = sys.argv[1]
        if backend == "torchair":
            import torchair

            config = torchair.CompilerConfig()
            config.mode = "reduce-overhead"
            backend = torchair.get_npu_backend(compiler_config=config)
        src, dst = torch.ones(4, 8).pin_memory(), torch.zeros(4, 8, device="npu")

        @torch.compile(backend=backend, fullgraph=True)
        def function(ids):
            torch.ops.npu_kv.swap_blocks_batch([src], [dst], ids, ids)
            return ids + 1

        for _ in range(2):
            try:
                function(torch.tensor([1]))
            except torch._dynamo.exc.TorchRuntimeError as error:
                print("at compile time:", "at the capture" in str(error))
        function(torch.tensor([1], device="npu"))  # the same function goes on
        torch.npu.synchronize()
        print(dst.sum(1).tolist())
        """,
        args=[compiler],
    )
    assert done.stdout.count("at compile time: True") == 2
    assert "[0.0, 8.0, 0.0, 0.0]" in done.stdout

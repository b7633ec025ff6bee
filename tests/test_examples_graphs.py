"""The examples of graph modes, each in a process of its own, as a user runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from conftest import ROOT

if TYPE_CHECKING:
    from conftest import RunScript

EXAMPLES = ROOT / "examples" / "graphs"
ON_NPU = {
    "npugraph.py": "torch.npu.NPUGraph",
    "graphed_callables.py": "torch.npu.make_graphed_callables",
    "npugraph_ex_backend.py": "npugraph_ex",
    "torchair_backend.py": "torchair reduce-overhead",
}
# Its folder comes first among those of modules, as with `python FILE`: a file there that is named
# as a module of torch_npu would be imported in its place.
RUN = f"""
import runpy, sys

sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path({str(EXAMPLES)!r} + "/" + sys.argv[1], run_name="__main__")
"""


@pytest.mark.npu
@pytest.mark.parametrize("name", ON_NPU)
def test_an_example_on_the_npu(run_script: RunScript, process_runtime: str, name: str) -> None:
    done = run_script(RUN, args=[name], runtime=process_runtime, timeout=280)
    assert done.stdout == f"ok   {ON_NPU[name]}: 5 replays, new blocks in each\n"


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_the_example_on_the_cpu(run_script: RunScript, backend: str) -> None:
    code = RUN.replace("sys.argv[1]", "sys.argv.pop(1)")
    args = ["inductor_backend.py", "--backend", backend]
    done = run_script(code, args=args, runtime="host", timeout=280)
    assert done.stdout == f"ok   {backend}: 5 calls, new blocks in each\n"


def test_a_pass_of_its_own(run_script: RunScript) -> None:
    done = run_script(RUN, args=["own_pass.py"], runtime="host")
    before, after = done.stdout.split("--- after")
    assert before.count("swap_blocks_batch.static(") == 2
    assert after.count("swap_blocks_batch.static(") == 1
    assert "drop-empty-swaps: 1 changes" in after
    assert after.endswith("ok   own_pass: one swap is gone, the values are right\n")


def test_every_example_is_run() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*ON_NPU, "inductor_backend.py", "own_pass.py"}


@pytest.mark.npu
@pytest.mark.parametrize("swap", ["all-at-once", "per-layer"])
def test_the_decoder_swaps_in_its_steps(
    run_script: RunScript, process_runtime: str, swap: str
) -> None:
    """The tokens are right, the control's are not, and the blocks came back inside of steps."""
    code = (ROOT / "examples" / "paged_decoder.py").read_text()
    args = ["--layers", "2", "--tokens", "12", "--swap", swap]
    done = run_script(code, args=args, runtime=process_runtime)
    lines = done.stdout.splitlines()
    assert [line[:4] for line in lines if "blocks):" in line] == ["ok  "] * 3
    moved = [line.split()[-5:] for line in lines if line.endswith("inside steps")]
    assert len(moved) == 2
    assert all(int(count) > 0 for count, *_ in moved)


@pytest.mark.npu
def test_an_example_says_when_bytes_are_wrong(run_script: RunScript, process_runtime: str) -> None:
    code = "import torch\ntorch.npu.NPUGraph.replay = lambda self: None\n" + RUN
    done = run_script(code, args=["npugraph.py"], runtime=process_runtime, check=False)
    assert (done.returncode, done.stdout[:4]) == (1, "FAIL"), done.stderr

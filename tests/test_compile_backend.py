"""``torch.compile(backend="npu_kv")``: its options, its inner backends, inductor's caches."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from npu_kv_ops import compile as backend
from npu_kv_ops import compiler_checks
from npu_kv_ops.graph_passes import PassManager, Reinplace, inductor_options

if TYPE_CHECKING:
    from conftest import RunScript

HERE = Path(__file__).parent
swap = torch.ops.npu_kv.swap_blocks_batch


def function(
    src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    before = dst[0] * 2
    swap(src, dst, a, b)
    return before + dst[0] + dst[2]


def arguments() -> list[Any]:
    made = torch.Generator().manual_seed(7)
    src, dst = ([torch.randn(8, 4, generator=made) for _ in range(3)] for _ in range(2))
    return [src, dst, torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])]


def check(call: Callable[..., Any], **compile_options: Any) -> None:
    """``call`` compiled does what it does."""
    torch._dynamo.reset()
    expected, found = arguments(), arguments()
    wanted = call(*expected)
    result = torch.compile(call, fullgraph=True, **compile_options)(*found)
    torch.testing.assert_close(result, wanted)
    assert all(map(torch.equal, found[0] + found[1], expected[0] + expected[1]))


@pytest.fixture(autouse=True)
def _counters() -> None:
    torch._dynamo.reset()
    counters.clear()


# ----------------------------------------------------------------------------------- the options


def test_the_default_is_for_the_machine(process_runtime: str) -> None:
    wanted = "inductor" if process_runtime == "host" else "npugraph_ex"
    assert backend.Options.of(None).inner == wanted
    assert backend.Options.of({"inner": None, "disable": ["merge"]}).inner == wanted
    # Copies between CPU tensors are no part of a captured graph.
    assert backend.Options.of(None, [1, torch.ones(1)]).inner == "inductor"
    if process_runtime != "host":
        on_npu = torch.ones(1, device="npu")
        assert backend.Options.of(None, [torch.ones(1), on_npu]).inner == "npugraph_ex"


def test_the_snippets_of_the_page(run_script: RunScript, process_runtime: str) -> None:
    page = (HERE.parent / "docs" / "graph_passes.md").read_text()
    first, own = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    code = """
ids = torch.tensor([3, -1]), torch.tensor([2, 5])
kept = host[0][3].clone()
assert torch.equal(step(torch.ones(16, 8), *ids), compiled(torch.ones(16, 8), *ids))
assert torch.equal(pool[0][2], kept)

@torch.compile(backend="npu_kv", options=options)
def empty(x):
    torch.ops.npu_kv.swap_blocks_batch(host, pool, [-1], [3])
    return x + pool[0].sum()

empty(torch.ones(1))
print(dict(torch._dynamo.utils.counters["npu_kv"]))
"""
    # All of it compiled op by op: what is to be seen here is that it runs and what it does.
    first = first.replace('backend="npu_kv"', 'backend="npu_kv", options={"inner": "eager"}')
    first += "compiled = step\nstep = step._torchdynamo_orig_callable\n"
    done = run_script(first + own + code, runtime=process_runtime)
    assert "'drop-empty-swaps': 1" in done.stdout
    assert "refused" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iner": "eager"}, r"no option 'iner'; there are \['inner', 'passes', 'disable', "),
        (
            {"inner": "cuda"},
            r"inner is 'cuda'; there are \['npugraph_ex', 'torchair', 'inductor', 'eager'\]",
        ),
        ({"inner": "eager", "inner_options": {"x": 1}}, "inner_options: 'eager' has none"),
        ({"inner": "eager", "disable": ["mrege"]}, "disable: no pass is named 'mrege'"),
        (
            {"inner": "eager", "passes": PassManager(), "dump_to": "x"},
            "give disable and dump_to to that",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as raised:
        check(function, backend="npu_kv", options=options)
    assert isinstance(raised.value.inner_exception, ValueError)


def test_a_mode_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"npu_kv takes options, not \['mode'\]"):
        check(function, backend="npu_kv", mode="reduce-overhead")


def test_options_of_the_inner_backend_are_its_own_to_refuse() -> None:
    options = {"inner": "inductor", "inner_options": {"max_autotun": True}}
    with pytest.raises(BackendCompilerFailed, match="max_autotun"):
        check(function, backend="npu_kv", options=options)


# --------------------------------------------------------------------------------- the inner ones


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_an_inner_backend_on_the_cpu(inner: str, tmp_path: Path) -> None:
    check(function, backend="npu_kv", options={"inner": inner, "dump_to": str(tmp_path)})
    assert counters["npu_kv"]["reinplace"] == 1
    assert counters["npu_kv"]["graphs"] == 1
    (last,) = tmp_path.glob("*_overlap_after.txt")
    assert not re.search("clone|auto_functionalized", last.read_text())
    assert not any("refused" in key for key in counters["npu_kv"])


def test_passes_are_chosen() -> None:
    for options in (
        {"disable": ["overlap", "merge"]},
        {"passes": [Reinplace()]},
        {"passes": PassManager([])},
    ):
        check(function, backend="npu_kv", options={"inner": "eager", **options})
    assert counters["npu_kv"] == {"reinplace": 2, "graphs": 3}


def test_what_stays_functional_is_right() -> None:
    """A call behind which an old value is needed is done on a clone."""

    def old_value(
        src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        copy = dst[0].clone()
        swap(src, [copy, *dst[1:]], a, b)
        return copy + dst[0] * 2

    for inner in ("eager", "inductor"):
        check(old_value, backend="npu_kv", options={"inner": inner})


def test_gradients_flow_past_a_swap() -> None:
    weight = torch.ones(8, 4, requires_grad=True)

    def with_gradients(*given: Any) -> torch.Tensor:
        return function(*given) * weight

    for inner in ("eager", "inductor"):
        check(with_gradients, backend="npu_kv", options={"inner": inner})


# The tests of every mode in which a graph is captured; and eager, which moves no byte more either.
@pytest.mark.timeout(400)
@pytest.mark.npu
@pytest.mark.parametrize("inner", ["npugraph_ex", "torchair", "eager"])
def test_an_inner_backend_on_the_npu(run_script: RunScript, inner: str) -> None:
    code = (HERE / "compile_backend_runner.py").read_text()
    done = run_script(code, args=[inner], timeout=380)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = [entry["scenario"] for entry in found]
    assert names == ["separate", "shared", "no merge", "no passes", "by hand", "CPU ids"]
    reads = [entry["reads of ids"] for entry in found[:-1]]
    assert reads == [2, 2, 8, 8, 2], "merged ones read their ids once"
    assert all(entry["passes"]["graphs"] == 1 for entry in found[:-1])
    assert not any("refused" in key for entry in found[:-1] for key in entry["passes"])
    assert found[-1]["refused for"] == ("" if inner == "eager" else inner)


@pytest.mark.npu
def test_torchair_behind_npugraph_ex_is_refused(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch

        def function(src, dst, ids):
            torch.ops.npu_kv.swap_blocks_batch([src], [dst], ids, ids)
            return ids + 1

        src, dst = torch.ones(4, 8).pin_memory(), torch.zeros(4, 8, device="npu")
        ids = torch.tensor([1], device="npu")
        for inner in (None, "torchair"):
            torch._dynamo.reset()
            try:
                torch.compile(function, backend="npu_kv", options={"inner": inner})(src, dst, ids)
            except Exception as error:
                print(inner, error)
        torch.npu.synchronize()
        print(dst.sum(1).tolist())
        """
    )
    assert re.search("torchair .*npugraph_ex was used in this process", done.stdout, re.S)
    assert "None" not in done.stdout
    assert "[0.0, 8.0, 0.0, 0.0]" in done.stdout


@pytest.mark.npu
def test_a_ge_graph_is_refused(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch, torchair
        from npu_kv_ops.compile import Options

        def ask(**options):
            try:
                print(Options.of({"inner": "torchair", **options}).torchair_config().mode.value)
            except ValueError as error:
                print("refused:", error)

        ask()
        ask(inner_options={"debug.run_eagerly": True, "mode": "npugraph_ex"})
        ask(inner_options=torchair.CompilerConfig())
        ask(inner_options={"mode": "max-autotune"})
        ask(inner_options={"debug.run_eager": True})
        """
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["reduce-overhead", "npugraph_ex"]
    assert lines[2] == lines[3]
    assert lines[2].startswith("refused: inner_options: torchair's mode 'max-autotune' makes a GE")
    assert lines[4].endswith("CompilerConfig has no 'debug.run_eager'")


def test_the_compiler_under_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What refuses CPU ids at compile time looks through this backend."""

    def under_way(backend_given: Any, **options: Any) -> str | None:
        wrapper = torch._TorchCompileWrapper(backend_given, None, options or None, None)
        monkeypatch.setattr(compiler_checks, "_compiler_fn", lambda: wrapper)
        return compiler_checks._compiler()

    assert under_way("npu_kv", inner="npugraph_ex") == "npugraph_ex"
    assert under_way(backend.npu_kv, inner="npugraph_ex") == "npugraph_ex"
    assert under_way("npu_kv", inner="npugraph_ex", inner_options={"force_eager": True}) is None
    for inner in ("eager", "inductor"):
        assert under_way("npu_kv", inner=inner) is None
    bound = functools.partial(backend.npu_kv, options={"inner": "npugraph_ex"})
    assert under_way(bound) == "npugraph_ex"
    assert under_way("npu_kv", inner="unknown") is None


# ------------------------------------------------------------------------------------ registration


def test_the_name_is_known() -> None:
    assert "npu_kv" in torch._dynamo.list_backends()
    assert registry.lookup_backend("npu_kv") is backend.npu_kv


def test_the_name_works_without_an_import(run_script: RunScript) -> None:
    """By the entry point, which needs the package to be installed."""
    done = run_script(
        """
        import sys, torch

        assert "npu_kv_ops.compile" not in sys.modules

        @torch.compile(backend="npu_kv", options={"inner": "eager"}, fullgraph=True)
        def function(src, dst, ids):
            torch.ops.npu_kv.swap_blocks_batch([src], [dst], ids, ids)
            return dst + 1

        print(function(torch.ones(3, 4), torch.zeros(3, 4), torch.tensor([1])).sum(1).tolist())
        """,
        runtime="host",
    )
    assert done.stdout == "[4.0, 8.0, 4.0]\n"


def test_the_entry_point_is_left_to_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo registers what an entry point gives; had this module done so, that would fail."""
    pending = dict.fromkeys(["npu_kv"], None)
    monkeypatch.setattr(registry, "_BACKENDS", pending)
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    backend._register()
    assert registry._COMPILER_FNS == {}
    registry.register_backend(backend.npu_kv, "npu_kv")
    monkeypatch.setattr(registry, "_BACKENDS", {})
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    backend._register()
    assert list(registry._COMPILER_FNS.items()) == [("npu_kv", backend.npu_kv)]
    backend._register()


# ---------------------------------------------------------------------------------------- inductor


class Plain:
    name = "plain"

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, graph: torch.fx.Graph) -> int:
        return 0


def test_inductors_cache_knows_the_passes(tmp_path: Path) -> None:
    def hits(**given: Any) -> int:
        counters.clear()
        check(function, backend="inductor", options=inductor_options(**given))
        # AOT's cache, which has inductor's graphs in it, comes first.
        return sum(
            counters[where][key]
            for where, key in (
                ("aot_autograd", "autograd_cache_hit"),
                ("inductor", "fxgraph_cache_hit"),
            )
        )

    with fresh_cache():
        assert hits() == 0
        assert hits() > 0
        assert hits(passes=PassManager(disable=["overlap"])) == 0
        assert hits(passes=[Reinplace(), Plain(1)]) == 0
        assert hits(passes=[Reinplace(), Plain(2)]) == 0
        assert hits(passes=[Reinplace(), Plain(2)]) > 0
        assert hits() > 0
        assert hits(passes=PassManager(dump_to=tmp_path)) == 0
        assert hits(passes=PassManager(dump_to=tmp_path)) == 0
    assert len(list(tmp_path.glob("*report.txt"))) == 2


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("reorder", [False, True])
def test_inductor_reads_before_a_swap_what_is_read_before_it(
    gradients: bool, reorder: bool
) -> None:
    """With its own fallback it multiplies what the swap has written."""
    weight = torch.full((8, 4), 2.0, requires_grad=gradients)

    def reads_first(
        src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        made = src[0] * 1
        from_views = dst[1][2:] + 3
        before = dst[0] * 2 + made
        swap(src, dst, a, b)
        swap([dst[0]], [made], b, a)
        return (before + dst[0] + made) * weight + from_views.sum()

    with fresh_cache():  # what is tested is made where its cache does not look
        check(reads_first, backend="inductor", options={"reorder_for_locality": reorder})

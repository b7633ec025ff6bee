"""The manager of the graph passes: order, switches, what it does with a wrong pass, files, ids."""

from __future__ import annotations

import gc
import logging
import operator
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch.fx import Graph, GraphModule

from npu_kv_ops import TransferError, graph_passes, ops
from npu_kv_ops.graph_passes import (
    GraphOrderError,
    InductorPasses,
    PassManager,
    PassReport,
    Reinplace,
    inductor_options,
    npugraph_ex_options,
    torchair_config,
)
from npu_kv_ops.graph_passes.dumps import GraphDump
from npu_kv_ops.graph_passes.snapshots import restore, snapshot

if TYPE_CHECKING:
    from conftest import RunScript

swap = torch.ops.npu_kv.swap_blocks_batch
start, wait = torch.ops.npu_kv.swap_blocks_start, torch.ops.npu_kv.swap_blocks_wait
BLOCKS, PAYLOAD, LAYERS = 8, 4, 3
Tensors = Sequence[torch.Tensor]
LOGGER = "npu_kv_ops.graph_passes"
DEFAULT = ["reinplace", "merge", "overlap"]


def step(host: Tensors, pool: Tensors, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A swap a layer, each followed by what reads it."""
    total = pool[0].new_zeros(PAYLOAD)
    for one, other in zip(host, pool):
        swap([one], [other], a, b)
        total = (total + other.sum(0)) * 2
    return total


def arguments() -> list[Any]:
    made = torch.Generator().manual_seed(3)
    host, pool = (
        [torch.randn(BLOCKS, PAYLOAD, generator=made) for _ in range(LAYERS)] for _ in range(2)
    )
    return [host, pool, torch.tensor([1, 2, -1]), torch.tensor([5, 3, 4])]


class Compiled:
    """``function`` through AOT with a manager, as the compilers run it; and whether it is right."""

    def __init__(
        self,
        manager: Callable[[GraphModule], PassReport],
        function: Callable[..., Any] = step,
        given: Callable[[], list[Any]] = arguments,
    ) -> None:
        def compiler(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
            self.given = [node.name for node in module.graph.nodes]
            graph = module.graph
            self.report = manager(module)
            assert module.graph is graph, "compilers hold on to the graph"
            self.code = module.code
            self.names = [node.name for node in graph.nodes]
            self.targets = [str(one.target) for one in graph.nodes if one.op == "call_function"]
            graph.lint()
            decompose_auto_functionalized(graph)
            module.recompile()
            return make_boxed_func(module.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
        expected, found = given(), given()
        wanted = function(*expected)
        with torch.no_grad():
            result = torch.compile(function, backend=backend, fullgraph=True)(*found)
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves([wanted, expected]), leaves([result, found]), strict=True):
            assert torch.equal(one, other)

    def count(self, operator_name: str) -> int:
        return sum(target.startswith(f"npu_kv.{operator_name}.") for target in self.targets)


class Own:
    """A pass that does what it is given."""

    def __init__(
        self, name: str, action: Callable[[Graph], Any] = lambda graph: 0, **more: Any
    ) -> None:
        self.name = name
        self.action = action
        self.seen: list[Graph] = []
        for key, value in more.items():
            setattr(self, key, value)

    def __call__(self, graph: Graph) -> Any:
        self.seen.append(graph)
        return self.action(graph)


def calls(graph: Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if str(node.target).startswith(f"npu_kv.{name}.")]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NPU_KV_DISABLE_PASSES", "NPU_KV_DUMP_GRAPHS"):
        monkeypatch.delenv(name, raising=False)
    counters.pop("npu_kv", None)
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------- running the passes


def test_the_passes_run_in_order_and_report() -> None:
    compiled = Compiled(PassManager())
    assert [run.name for run in compiled.report.passes] == DEFAULT
    assert compiled.report.passes[0].changes == LAYERS
    assert all(run.changes > 0 and run.refused is None for run in compiled.report.passes)
    nodes = [(run.nodes_before, run.nodes_after) for run in compiled.report.passes]
    assert nodes[0][0] == len(compiled.given)
    assert nodes[-1][1] == len(compiled.names)
    assert nodes[0][1] == nodes[1][0]
    assert 0 < sum(run.seconds for run in compiled.report.passes) <= compiled.report.seconds
    assert compiled.report.changed
    assert "merge: " in str(compiled.report)
    # One transfer for all layers, each waited for where its layer is read.
    assert [compiled.count(f"swap_blocks_{one}") for one in ("batch", "start", "wait")] == [0, 1, 3]
    assert "swap_blocks_start" in compiled.code, "recompiled"
    changes = {run.name: run.changes for run in compiled.report.passes}
    assert counters["npu_kv"] == {**changes, "graphs": 1}


def test_a_graph_without_the_operators_is_left_alone(tmp_path: Path) -> None:
    own = Own("own")
    manager = PassManager([Reinplace(), own], dump_to=tmp_path)
    compiled = Compiled(manager, lambda x: x * 2 + 1, lambda: [torch.ones(3)])
    assert compiled.report == PassReport()
    assert not compiled.report.changed
    assert own.seen == []
    assert list(tmp_path.iterdir()) == []
    assert not counters["npu_kv"]


def test_nothing_is_recompiled_when_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[GraphModule] = []

    def managed(module: GraphModule) -> PassReport:
        with monkeypatch.context() as context:
            context.setattr(GraphModule, "recompile", times.append)
            return PassManager([Own("own")])(module)

    assert not Compiled(managed).report.changed
    assert times == []


# ---------------------------------------------------------------------------------- switching off


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("names", [["merge"], ["overlap"], ["merge", "overlap"], ["reinplace"]])
def test_passes_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, names: list[str], by_environment: bool
) -> None:
    manager = PassManager(disable=() if by_environment else names)
    if by_environment:  # read at the call
        monkeypatch.setenv("NPU_KV_DISABLE_PASSES", " , ".join(names))
    compiled = Compiled(manager)
    assert [run.name for run in compiled.report.passes] == [x for x in DEFAULT if x not in names]
    batch, started, waited = (
        compiled.count(f"swap_blocks_{one}") for one in ("batch", "start", "wait")
    )
    if "reinplace" in names:  # all stay functional
        assert (batch, started, waited) == (0, 0, 0)
        return
    assert batch + started == (LAYERS if "merge" in names else 1)
    assert (started > 0) == (waited > 0) == ("overlap" not in names)


def test_names_that_no_pass_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = r"'check', 'merge', 'overlap', 'reinplace'"
    with pytest.raises(ValueError, match=rf"disable: no pass is named 'mrege'; .*{known}"):
        PassManager(disable=["mrege"])
    with pytest.raises(ValueError, match=r"disable: no pass is named 'merge'; .*'check', 'own'"):
        PassManager([Own("own")], disable=["merge"])
    with pytest.raises(TypeError, match="disable must be a list of names, got 'merge'"):
        PassManager(disable="merge")
    monkeypatch.setenv("NPU_KV_DISABLE_PASSES", "merge,fast")
    with pytest.raises(ValueError, match="NPU_KV_DISABLE_PASSES: no pass is named 'fast'"):
        PassManager().disabled()
    # The variable is for all managers of a process; not each has all passes.
    monkeypatch.setenv("NPU_KV_DISABLE_PASSES", "merge")
    assert PassManager([Own("own")]).disabled() == {"merge"}


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        ([Reinplace], TypeError, "is no pass: it needs a name and __call__"),
        ([lambda graph: 0], TypeError, "is no pass: it needs a name and __call__"),
        ([Own("a b")], ValueError, "has the name 'a b', which is no name"),
        ([Own("../up")], ValueError, "which is no name"),
        ([Own("one"), Own("one")], ValueError, "more than one is named 'one'"),
        ([Own("check")], ValueError, "more than one is named 'check'"),
    ],
)
def test_what_is_no_pass_is_refused(
    passes: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PassManager(passes)


# ----------------------------------------------------------------------------------- wrong passes


def raises_half_way(graph: Graph) -> int:
    for node in list(graph.nodes)[:3]:
        node.replace_all_uses_with(node, lambda user: False)
    last = calls(graph, "swap_blocks_batch")[-1]
    graph.erase_node(last)
    raise KeyError("half way")


def puts_a_user_first(graph: Graph) -> int:
    total = next(node for node in graph.nodes if node.target is torch.ops.aten.sum.dim_IntList)
    next(iter(total.users)).append(total)
    return 1


def drops_a_transfer(graph: Graph) -> int:
    graph.erase_node(calls(graph, "swap_blocks_batch")[1])
    return 1


def swaps_behind_the_reader(graph: Graph) -> int:
    call = calls(graph, "swap_blocks_batch")[0]
    next(node for node in call.args[1][0].users if "sum" in node.name).append(call)
    return 1


def empties_the_graph(graph: Graph) -> int:
    for node in reversed(list(graph.nodes)):
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    raise RuntimeError("nothing is left")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (raises_half_way, "KeyError: 'half way'"),
        (puts_a_user_first, "RuntimeError: Argument 'sum_"),
        (drops_a_transfer, "GraphOrderError: the transfer .* is gone"),
        (swaps_behind_the_reader, "GraphOrderError: the transfer .* must be over before sum_"),
        (empties_the_graph, "RuntimeError: nothing is left"),
        (lambda graph: None, "TypeError: a pass returns the number of its changes, .* None"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_pass_is_named_and_its_graph_not_used(
    caplog: pytest.LogCaptureFixture, action: Callable[[Graph], Any], reason: str
) -> None:
    before: list[tuple[str, str]] = []

    def look(graph: Graph) -> int:
        before[:] = [(node.name, node.format_node() or "") for node in graph.nodes]
        return 0

    later = Own("later", lambda graph: before.append(("later", "")) or 0)
    first, wrong = Own("first", look), Own("wrong", action)
    with caplog.at_level(logging.INFO, LOGGER):
        compiled = Compiled(PassManager([Reinplace(), first, wrong, later]))  # values are right
    runs = {run.name: run for run in compiled.report.passes}
    assert re.search(reason, str(runs["wrong"].refused))
    assert runs["wrong"].changes == 0
    assert before[-1] == ("later", ""), "later passes run"
    assert compiled.names == [name for name, _ in before[:-1]], "the names are as they were"
    errors = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert len(errors) == 1
    assert re.search(f"wrong is refused, .*{reason}", errors[0].getMessage())
    assert errors[0].exc_info is not None, "with its traceback"
    assert counters["npu_kv"]["wrong refused"] == 1


def test_the_check_is_what_refuses_a_wrong_order() -> None:
    """And a pass is judged by the graph before it, not by what a refused one has left."""
    own = [Reinplace(), Own("wrong", drops_a_transfer), Own("too", swaps_behind_the_reader)]
    found = Compiled(PassManager(own)).report.passes
    assert [run.refused is not None for run in found] == [False, True, True]
    with pytest.raises(AssertionError):  # the values are wrong
        Compiled(PassManager(own, disable=["check"]))


def test_a_pass_of_its_own_may_drop_transfers_if_it_says_so() -> None:
    def drop_the_last(graph: Graph) -> int:
        call = calls(graph, "swap_blocks_batch")[-1]
        graph.erase_node(call)
        return 1

    def given() -> list[Any]:
        host, pool, a, _ = arguments()
        return [[*host[:2], pool[2].clone()], pool, a, a.clone()]  # the last changes nothing

    passes = [Reinplace(), Own("drop", drop_the_last), *PassManager().passes[1:]]
    assert Compiled(PassManager(passes), step, given).report.passes[1].refused is not None
    passes[1] = Own("drop", drop_the_last, changes_transfers=True)
    compiled = Compiled(PassManager(passes), step, given)
    assert [run.refused for run in compiled.report.passes] == [None] * 4
    assert compiled.count("swap_blocks_wait") == 2

    def split_and_forget(graph: Graph) -> int:
        call = calls(graph, "swap_blocks_batch")[-1]
        with graph.inserting_after(call):
            graph.call_function(start.default, call.args)
        graph.erase_node(call)
        return 1

    passes[1] = Own("forget", split_and_forget, changes_transfers=True)
    refused = Compiled(PassManager(passes), step, given).report.passes[1].refused
    assert refused is not None
    assert "is never waited for" in refused


def test_passes_before_reinplace_see_the_functional_graph() -> None:
    seen: list[int] = []

    def count(graph: Graph) -> int:
        hop = torch.ops.higher_order.auto_functionalized_v2
        seen.append(len(graph.find_nodes(op="call_function", target=hop)))
        return 0

    Compiled(PassManager([Own("before", count), Reinplace(), Own("behind", count)]))
    assert seen == [LAYERS, 0]


def test_errors_of_the_program_are_raised() -> None:
    def forgets_to_wait(host: Tensors, pool: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
        ticket = start(host, pool, a, b)
        return pool[0] + ticket

    def touches_it(host: Tensors, pool: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
        ticket = start(host, pool, a, b)
        pool[1].add_(1)
        wait(ticket, host, pool)
        return pool[0] + 1

    def is_right(host: Tensors, pool: Tensors, a: torch.Tensor, b: torch.Tensor) -> Any:
        ticket = start(host, pool, a, b)
        meanwhile = a * 2
        wait(ticket, host, pool)
        return pool[0].sum() + meanwhile

    for function, message in (
        (forgets_to_wait, "never waited for"),
        (touches_it, "under way"),
    ):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as raised:
            Compiled(PassManager(), function)
        assert isinstance(raised.value.inner_exception, GraphOrderError)
    del raised
    gc.collect()
    with pytest.raises(TransferError, match="never waited for"):
        ops.raise_pending_errors()  # of the first, which has run as it is for comparison
    compiled = Compiled(PassManager(), is_right)
    assert all(run.refused is None for run in compiled.report.passes)
    assert [compiled.count(f"swap_blocks_{one}") for one in ("start", "wait")] == [1, 1]


def test_a_restored_graph_is_the_graph() -> None:
    def look(module: GraphModule) -> PassReport:
        graph = module.graph

        def state() -> list[Any]:
            return [
                (node.name, node.op, node.target, str(node.args), str(node.kwargs), node.type)
                for node in graph.nodes
            ]

        before, meta = state(), {node.name: dict(node.meta) for node in graph.nodes}
        kept = snapshot(graph)
        for node in graph.nodes:
            node.meta.clear()
        with pytest.raises(RuntimeError, match="nothing is left"):
            empties_the_graph(graph)
        restore(graph, kept)
        assert state() == before
        for node in graph.nodes:
            assert node.meta.keys() == meta[node.name].keys()
            assert all(map(operator.is_, node.meta.values(), meta[node.name].values()))
        added = graph.call_function(torch.relu, (next(iter(graph.nodes)),))
        assert added.name not in meta
        graph.erase_node(added)
        return PassReport()

    Compiled(look)


# ----------------------------------------------------------------------------------- files and logs


@pytest.mark.parametrize("by_environment", [False, True])
def test_graphs_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_environment: bool
) -> None:
    folder = tmp_path / "new" / "folder"
    passes = [Reinplace(), Own("wrong", drops_a_transfer), *PassManager().passes[1:]]
    if by_environment:
        monkeypatch.setenv("NPU_KV_DUMP_GRAPHS", str(folder))
    manager = PassManager(passes, dump_to=None if by_environment else folder)
    Compiled(manager)
    Compiled(manager)
    steps = [
        *(f"1_reinplace_{which}" for which in ("before", "after")),
        *(f"2_wrong_{which}" for which in ("before", "refused")),
        *(f"3_merge_{which}" for which in ("before", "after")),
        *(f"4_overlap_{which}" for which in ("before", "after")),
        "report",
    ]
    names = {f"{number}_{one}.txt" for number in ("0001", "0002") for one in steps}
    assert {path.name for path in folder.iterdir()} == names
    text = {one: (folder / f"0001_{one}.txt").read_text() for one in steps}
    assert "auto_functionalized_v2" in text["1_reinplace_before"]
    assert "auto_functionalized_v2" not in text["1_reinplace_after"]
    assert f"f32[{BLOCKS}, {PAYLOAD}]" in text["1_reinplace_before"], "with shapes"
    assert text["2_wrong_refused"].count("swap_blocks_batch.default(") == LAYERS - 1
    assert text["3_merge_before"] == text["1_reinplace_after"]
    assert "swap_blocks_start" in text["4_overlap_after"]
    assert re.search("^reinplace: 3 changes.*^wrong: refused.*", text["report"], re.S | re.M)


def test_a_number_is_given_once(tmp_path: Path) -> None:
    """Whoever writes, and whatever lies there."""
    (tmp_path / "0007_report.txt").write_text("mine")
    (tmp_path / "x_report.txt").write_text("no number")
    ready = threading.Barrier(8)

    def claim() -> None:
        for _ in range(20):
            ready.wait()
            GraphDump(tmp_path)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(path.name for path in tmp_path.glob("0*_report.txt"))
    assert numbers == [f"{number:04}_report.txt" for number in range(7, 7 + 160 + 1)]
    assert (tmp_path / "0007_report.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"FileExistsError|NotADir"):
        Compiled(PassManager(dump_to=tmp_path / "file"))


def test_each_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        Compiled(PassManager())
    lines = [entry.getMessage() for entry in caplog.records if entry.name == LOGGER]
    assert [line.partition(":")[0] for line in lines[:3]] == DEFAULT
    assert re.fullmatch(r"reinplace: 3 changes, \d+ -> \d+ nodes, \d+\.\d ms", lines[0])
    assert not any("def forward" in line for line in lines)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, LOGGER):
        Compiled(PassManager())
    graphs = [entry.getMessage() for entry in caplog.records if "def forward" in entry.getMessage()]
    assert [graph.partition(":")[0] for graph in graphs] == [f"behind {name}" for name in DEFAULT]


def test_torch_logs_carries_them(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch
        import npu_kv_ops.compile

        @torch.compile(backend="npu_kv", options={"inner": "eager"})
        def function(src, dst, ids):
            torch.ops.npu_kv.swap_blocks_batch([src], [dst], ids, ids)
            return dst + 1

        function(torch.ones(4, 8), torch.zeros(4, 8), torch.tensor([1]))
        """,
        runtime="host",
        env={"TORCH_LOGS": f"+{LOGGER}"},
    )
    assert re.search(r"I\d.*manager.py.* reinplace: 1 changes", done.stderr)
    assert re.search(r"V\d.*manager.py.* behind reinplace", done.stderr)


# ------------------------------------------------------------------------------------- identities


class Plain:
    name = "plain"

    def __init__(self, limit: object = 1) -> None:
        self.limit = limit

    def __call__(self, graph: Graph) -> int:
        return 0


class Other(Plain):
    pass


def test_managers_that_do_the_same_have_one_id() -> None:
    def uuid(*passes: Any, **more: Any) -> str | None:
        return PassManager(passes or None, **more).uuid()

    assert uuid() is not None
    assert uuid() == uuid()
    assert uuid(Plain(1)) == uuid(Plain(1))
    different = [
        uuid(),
        uuid(disable=["merge"]),
        uuid(disable=["check"]),
        uuid(Plain(1)),
        uuid(Plain(2)),
        uuid(Plain("1")),
        uuid(Other(1)),
        uuid(Plain(1), Reinplace()),
        uuid(Reinplace(), Plain(1)),
        uuid(Own("own", uuid=lambda: "mine")),
    ]
    assert None not in different
    assert len(set(different)) == len(different)
    assert uuid(Plain([1])) is None, "an attribute that may be anything"
    assert uuid(Own("own", uuid=lambda: None)) is None
    assert uuid(Plain([1]), Reinplace(), disable=["plain"]) == uuid(Reinplace())


def test_the_id_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager = PassManager()
    before = manager.uuid()
    monkeypatch.setenv("NPU_KV_DISABLE_PASSES", "merge")
    assert manager.uuid() == PassManager(disable=["merge"]).uuid() != before
    monkeypatch.delenv("NPU_KV_DISABLE_PASSES")
    monkeypatch.setenv("NPU_KV_DUMP_GRAPHS", str(tmp_path))
    assert manager.uuid() is None, "from a cache no graph would be written"


def test_the_id_is_the_same_in_another_process(run_script: RunScript) -> None:
    code = "from npu_kv_ops.graph_passes import PassManager\nprint(PassManager().uuid())"
    assert run_script(code, runtime="host").stdout.strip() == PassManager().uuid()


# ---------------------------------------------------------------------------------- the ways in


class TorchairConfig:
    """As torchair's: what is set becomes the value of the option."""

    def __init__(self, hook: Any) -> None:
        self.__dict__["post_grad_custom_post_pass"] = SimpleNamespace(value=hook)

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name).value = value


def test_the_hook_of_the_user_comes_first() -> None:
    order: list[str] = []

    def hook(module: GraphModule, example_inputs: Any, config: Any) -> None:
        order.append(f"hook {example_inputs} {config}")

    def own(graph: Graph) -> int:
        order.append("pass")
        return 0

    manager = PassManager([Own("own", own)])
    key = "post_grad_custom_post_pass"
    options = npugraph_ex_options(manager, force_eager=True, post_grad_custom_post_pass=hook)
    assert options.keys() == {"force_eager", key}
    config = TorchairConfig(hook)
    for _ in range(2):  # a configuration for each of several graphs: ours are not in it twice
        assert torchair_config(config, manager) is config

    for compiler_pass in (options[key], config.post_grad_custom_post_pass.value):
        order.clear()

        def managed(module: GraphModule, run: Any = compiler_pass) -> PassReport:
            run(module, "inputs", "config")
            return PassReport()

        Compiled(managed)
        assert order == ["hook inputs config", "pass"]


def test_inductors_own_passes_stay() -> None:
    from torch._inductor import config

    def before(graph: Graph) -> None: ...

    key = "post_grad_custom_post_pass"
    (ours,) = inductor_options()[key]
    assert isinstance(ours, InductorPasses)
    assert inductor_options(post_grad_custom_post_pass=before)[key][:-1] == [before]
    with config.patch(key, [before, before]):
        assert inductor_options()[key][:-1] == [before, before]
        assert inductor_options(post_grad_custom_post_pass=None)[key][:-1] == []
    assert inductor_options(max_autotune=True)["max_autotune"] is True
    assert inductor_options(reorder_for_locality=True)["reorder_for_locality"] is True


def test_a_list_of_passes_will_do() -> None:
    (ours,) = inductor_options([Reinplace(), Plain()])["post_grad_custom_post_pass"]
    assert [one.name for one in ours.manager.passes] == ["reinplace", "plain"]
    with pytest.raises(ValueError, match="belongs to no module"):
        ours(Graph())


def test_importing_the_package_imports_no_compiler() -> None:
    """The package can be looked at before torch is imported."""
    code = (
        "import sys, npu_kv_ops\n"
        "assert 'graph_passes' in npu_kv_ops.__all__\n"
        "assert not [m for m in sys.modules if m.startswith(('torch', 'npu_kv_ops.compile'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": sys.path[0]})
    assert graph_passes.__all__ == sorted(graph_passes.__all__)


def test_passes_that_cannot_be_told_apart_have_no_identity() -> None:
    class MadeHere(WithSlots):
        pass

    assert PassManager([WithSlots(1)]).uuid() is None
    assert PassManager([MadeHere(1)]).uuid() is None


class WithSlots:
    __slots__ = ("number",)
    name = "with-slots"

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, graph: torch.fx.Graph) -> int:
        return 0

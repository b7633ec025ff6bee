"""Every scenario of one graph mode, in a process of its own: ``graph_mode_runner.py MODE``.

Prints a line of JSON for each scenario. A scenario that fails ends the process with a traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import npu_kv_ops
from npu_kv_ops import ops, simulator

LAYERS, BLOCKS, PAYLOAD, PAIRS = 4, 16, 64, 8
REPLAYS = 100
BLOCK_BYTES = PAYLOAD * 2

swap = torch.ops.npu_kv.swap_blocks_batch
Call = Callable[..., torch.Tensor]
mode = sys.argv[1]
on_npu = mode not in ("aot_eager", "inductor")
captures = mode not in ("aot_eager", "inductor")
device = "npu" if on_npu else "cpu"


def main() -> None:
    for name, scenario in SCENARIOS.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        print(json.dumps({"scenario": name, **(scenario() or {})}), flush=True)
    ops.raise_pending_errors()


# ------------------------------------------------------------------------------------ the modes


def compiled(function: Call, sample: tuple[Any, ...], *, passes: bool = False) -> Call:
    """``function`` in the mode of this process. ``sample``: arguments of the kind to come."""
    if mode == "npugraph":
        return by_hand(function, sample)
    if mode == "make_graphed_callables":
        return torch.npu.make_graphed_callables(function, sample)
    if mode.startswith("npugraph_ex"):
        from npu_kv_ops.graph_passes import npugraph_ex_options

        return torch.compile(
            function,
            backend="npugraph_ex",
            fullgraph=True,
            dynamic=mode == "npugraph_ex dynamic",
            options=npugraph_ex_options() if passes else None,
        )
    if mode == "torchair":
        return torch.compile(function, backend=torchair_backend(passes), fullgraph=True)
    return torch.compile(function, backend=mode, fullgraph=True)


def torchair_backend(passes: bool) -> Any:
    import torchair

    from npu_kv_ops.graph_passes import torchair_config

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    return torchair.get_npu_backend(compiler_config=torchair_config(config) if passes else config)


def by_hand(function: Call, sample: tuple[Any, ...]) -> Call:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function(*sample)
    places = list(tensors_in(sample))

    def replay(*arguments: Any) -> torch.Tensor:
        for place, value in zip(places, tensors_in(arguments), strict=True):
            if place is not value:
                place.copy_(value)
        graph.replay()
        return result

    return replay


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        else:
            yield from tensors_in(argument)


# ---------------------------------------------------------------------------------- the checking


class Pools:
    """Device and host tensors of some layout, and what they have to hold."""

    def __init__(self, layout: str = "separate") -> None:
        self.device = make(layout, device)
        self.host = make(layout, "cpu")
        self.layout = layout
        self.expected = [
            [layer.cpu().clone() for layer in side] for side in (self.views(0), self.views(1))
        ]

    def views(self, side: int) -> list[torch.Tensor]:
        tensors = (self.device, self.host)[side]
        return list(tensors[0].unbind(0)) if self.layout == "stacked" else tensors

    def sides(self, store: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return (self.device, self.host) if store else (self.host, self.device)

    def apply(self, store: bool, src: torch.Tensor, dst: torch.Tensor) -> int:
        """The copy on the CPU; returns the bytes."""
        source, target = self.expected if store else self.expected[::-1]
        real = [(int(a), int(b)) for a, b in zip(src, dst) if a >= 0 and b >= 0]
        for one, other in zip(source, target, strict=True):
            for a, b in real:
                other[b] = one[a]
        return len(real) * LAYERS * BLOCK_BYTES

    def check(self, what: object) -> None:
        for side in (0, 1):
            for layer, (found, wanted) in enumerate(zip(self.views(side), self.expected[side])):
                assert torch.equal(found.cpu(), wanted), f"{what}: side {side}, layer {layer}"


def make(layout: str, where: str) -> list[torch.Tensor]:
    def to(tensor: torch.Tensor) -> torch.Tensor:
        if where == "cpu":
            return tensor.pin_memory() if on_npu else tensor
        return tensor.to(where)

    if layout == "separate":
        return [to(torch.randn(BLOCKS, PAYLOAD).half()) for _ in range(LAYERS)]
    whole = to(torch.randn(LAYERS, BLOCKS, PAYLOAD).half())
    return [whole] if layout == "stacked" else list(whole.unbind(0))


def new_ids(round_: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Other blocks every time, and another number of real pairs."""
    src, dst = (torch.randperm(BLOCKS)[:PAIRS].to(dtype) for _ in range(2))
    padding = torch.randperm(PAIRS)[: round_ % (PAIRS + 1)]
    (src if round_ % 2 else dst)[padding] = -1
    return src, dst


class Counted:
    """What the simulated runtime did during a block of code."""

    def __enter__(self) -> Counted:
        if on_npu:
            torch.npu.synchronize()
        simulator.reset_stats() if on_npu else None
        return self

    def __exit__(self, *_: object) -> None:
        if not on_npu:
            return
        torch.npu.synchronize()
        stats = simulator.stats()
        self.bytes = dict(stats.bytes)
        self.captures = stats.calls.get("aclmdlRICaptureBegin", 0)
        self.replays = stats.calls.get("aclmdlRIExecuteAsync", 0)


def run(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    apply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, int]],
    check: Callable[[object], None],
    dtype: torch.dtype = torch.int64,
    replays: int = REPLAYS,
    exact: bool = True,
) -> dict[str, Any]:
    """Calls ``function`` with new ids again and again.

    ``apply`` does the same on the CPU, looks at the result, and returns the bytes that have to
    cross, by direction, and the number of calls if it is not one.
    """
    extra: set[int] = set()
    for round_ in range(replays):
        src, dst = new_ids(round_, dtype)
        arguments = src.to(device), dst.to(device)
        with Counted() as counted:
            result = function(*arguments)
        crossing = apply(src, dst, result.cpu())
        if round_ == 0:
            check("the first call")
            continue
        if captures:
            assert counted.captures == 0, f"replay {round_} captured"
            assert counted.replays == 1, f"replay {round_} was {counted.replays} graphs"
            ids = sum(t.numel() * t.itemsize for t in arguments)
            if exact:
                assert counted.bytes["h2d"] == crossing["h2d"], (round_, counted.bytes, crossing)
                d2h_of_ids = counted.bytes["d2h"] - crossing["d2h"]
                assert d2h_of_ids == ids * crossing.get("calls", 1), (counted.bytes, crossing)
                extra.add(counted.bytes["d2d"] // ids)
                assert counted.bytes["d2d"] in (0, ids), (round_, counted.bytes)
        if round_ % 10 == 1 or round_ == replays - 1:
            check(f"replay {round_}")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if mode not in ("npugraph", "make_graphed_callables"):
        assert graphs == 1, f"{graphs} graphs were compiled"
    return {"replays": replays, "ids_copied_on_the_device": sorted(extra)}


# ------------------------------------------------------------------------------------- scenarios


def plain(
    store: bool, dtype: torch.dtype, layout: str = "separate", where: str = "arguments"
) -> Any:
    def scenario() -> dict[str, Any]:
        pools = Pools(layout)
        src, dst = pools.sides(store)
        sample = new_ids(0, dtype)
        passes = layout == "shared"
        ids = tuple(one.fill_(-1).to(device) for one in sample)

        def call(
            src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
        ) -> None:
            if layout == "stacked":  # views that are taken in the graph
                swap(list(src[0].unbind(0)), list(dst[0].unbind(0)), a, b)
            else:
                swap(src, dst, a, b)

        if where == "arguments" and mode not in ("npugraph", "make_graphed_callables"):

            def function(
                src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
            ) -> torch.Tensor:
                call(src, dst, a, b)
                return a + 1

            graph = compiled(function, (src, dst, *ids), passes=passes)

            def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return graph(src, dst, a, b)

        elif where == "attribute":

            class Model(torch.nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.src, self.dst = src, dst

                def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                    call(self.src, self.dst, a, b)
                    return a + 1

            step = compiled(Model(), ids, passes=passes)
        else:

            def from_closure(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                call(src, dst, a, b)
                return a + 1

            step = compiled(from_closure, ids, passes=passes)

        def apply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> dict[str, int]:
            assert torch.equal(result, a + 1)
            crossing = pools.apply(store, a, b)
            return {"h2d": 0 if store else crossing, "d2h": crossing if store else 0}

        return run(step, apply, pools.check, dtype)

    return scenario


def several_calls() -> dict[str, Any]:
    """Load, store and load of the same tensors, with arithmetic between them."""
    pools = Pools()
    dev, host = pools.device, pools.host

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        swap(host, dev, a, b)
        for tensor in dev:
            tensor.mul_(-1)
        swap(dev, host, b, a)
        total = dev[0].sum() + dev[-1].sum()
        swap(host, dev, a, b)
        return total

    ids = [torch.full((PAIRS,), -1, device=device) for _ in range(2)]
    passes = mode in ("npugraph", "npugraph_ex static", "npugraph_ex dynamic", "torchair")
    graph = compiled(function, tuple(ids), passes=passes)
    if mode in ("npugraph", "make_graphed_callables"):
        # What the captures and warm-ups have computed.
        pools.expected = [[t.cpu().clone() for t in side] for side in (dev, host)]

    def apply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> dict[str, int]:
        crossing = pools.apply(False, a, b)
        for tensor in pools.expected[0]:
            tensor.mul_(-1)
        pools.apply(True, b, a)
        wanted = pools.expected[0][0].sum() + pools.expected[0][-1].sum()
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-1)
        pools.apply(False, a, b)
        return {"h2d": 2 * crossing, "d2h": crossing, "calls": 3}

    return run(graph, apply, pools.check, replays=30)


def split_by_hand() -> dict[str, Any]:
    """Start, compute, and wait for one part after the other; a load, then a store."""
    pools = Pools()
    dev, host = pools.device, pools.host
    start, wait = torch.ops.npu_kv.swap_blocks_start, torch.ops.npu_kv.swap_blocks_wait

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ticket = start(host, dev, a, b, [1, LAYERS - 1])
        total = (a * b).sum()
        wait(ticket, host[:1], dev[:1], 0)
        total = total + dev[0].sum()
        wait(ticket, host[1:], dev[1:], 1)
        ticket = start(dev, host, b, a)
        total = total + dev[-1].sum()
        wait(ticket, dev, host)
        for tensor in dev:
            tensor.mul_(-1)
        return total

    ids = [torch.full((PAIRS,), -1, device=device) for _ in range(2)]
    graph = compiled(function, tuple(ids))
    if mode in ("npugraph", "make_graphed_callables"):
        # What the captures and warm-ups have computed.
        pools.expected = [[t.cpu().clone() for t in side] for side in (dev, host)]

    def apply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> dict[str, int]:
        crossing = pools.apply(False, a, b)
        wanted = (a * b).sum() + sum(pools.expected[0][layer].sum() for layer in (0, -1))
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-1)
        pools.apply(True, b, a)
        for tensor in pools.expected[0]:
            tensor.mul_(-1)
        return {"h2d": crossing, "d2h": crossing, "calls": 2}

    return run(graph, apply, pools.check, replays=30)


def made_in_the_graph() -> dict[str, Any]:
    """Destinations and sources that the graph computes, read by what follows."""
    pools = Pools()
    dev, host = pools.device, pools.host
    for tensor in dev:  # an input that is only read is copied otherwise, swap or no swap
        torch._dynamo.mark_static_address(tensor)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        doubled = [tensor * 2 for tensor in dev]
        swap(host, doubled, a, b)
        after = [tensor + 1 for tensor in doubled]
        swap(after, host, a, b)
        return torch.stack(after)

    ids = [torch.full((PAIRS,), -1, device=device) for _ in range(2)]
    graph = compiled(function, tuple(ids))

    def apply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> dict[str, int]:
        real = [(int(x), int(y)) for x, y in zip(a, b) if x >= 0 and y >= 0]
        doubled = [tensor * 2 for tensor in pools.expected[0]]
        for layer, tensor in enumerate(doubled):
            for x, y in real:
                tensor[y] = pools.expected[1][layer][x]
        after = [tensor + 1 for tensor in doubled]
        for layer, tensor in enumerate(after):
            for x, y in real:
                pools.expected[1][layer][y] = tensor[x]
        assert torch.equal(result, torch.stack(after))
        crossing = len(real) * LAYERS * BLOCK_BYTES
        return {"h2d": crossing, "d2h": crossing, "calls": 2}

    return run(graph, apply, pools.check, replays=30)


def side_stream() -> dict[str, Any]:
    """The swap on a stream of its own inside the model, with events around it."""
    pools = Pools()
    dev, host = pools.device, pools.host
    side = torch.npu.Stream()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ready, loaded = torch.npu.Event(), torch.npu.Event()
        ready.record()
        with torch.npu.stream(side):
            ready.wait()
            swap(host, dev, a, b)
            loaded.record()
        meanwhile = a * 2
        loaded.wait()
        return torch.stack(dev) + meanwhile.sum()

    ids = [torch.full((PAIRS,), -1, device=device) for _ in range(2)]
    graph = compiled(function, tuple(ids))

    def apply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> dict[str, int]:
        crossing = pools.apply(False, a, b)
        torch.testing.assert_close(result, torch.stack(pools.expected[0]) + (a * 2).sum())
        return {"h2d": crossing, "d2h": 0}

    return run(graph, apply, pools.check, replays=30)


def a_clone_as_source() -> dict[str, Any]:
    """A compiler may drop the clone (pytorch #198031): an error then, never wrong bytes."""
    tensor = torch.randn(BLOCKS, PAYLOAD).half().to(device)
    before = tensor.cpu().clone()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        swap([copy], [tensor], a, b)
        return tensor.sum() + copy.sum()

    first = [torch.full((PAIRS,), -1, device=device) for _ in range(2)]
    src = torch.arange(PAIRS)
    dst = src + 1  # every block but the first is read and written
    error = total = None
    try:
        graph = compiled(function, tuple(first))
        total = graph(src.to(device), dst.to(device))
        if on_npu:
            torch.npu.synchronize()
        ops.raise_pending_errors()
    except Exception as raised:
        error = str(raised)
    if error is not None:
        assert "both read and written" in error or "share memory" in error, error
        assert torch.equal(tensor.cpu(), before)
        return {"outcome": "error"}
    wanted = before.clone()
    wanted[dst] = before[src]
    assert torch.equal(tensor.cpu(), wanted)
    expected = wanted.sum() + before.sum()
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-2, atol=1e-1)
    return {"outcome": "right"}


def what_a_graph_refuses() -> dict[str, Any]:
    """CPU ids stop a compile, or a capture, and do not break what comes after."""
    pools = Pools()
    src, dst = pools.sides(False)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        swap(src, dst, a, b)
        return dst[0] + 1

    ids = new_ids(0, torch.int64)
    error = "none"
    try:
        compiled(function, ids)(*ids)
    except Exception as raised:
        error = str(raised)
    assert "NPU tensors, which are read at every replay" in error, error
    torch.npu.synchronize()
    if mode == "make_graphed_callables":
        pools.apply(False, *ids)  # its warm-up runs outside of a capture
    pools.check("after the refusal")
    on_device = tuple(one.to(device) for one in ids)
    step = compiled(function, on_device)
    step(*on_device)
    pools.apply(False, *ids)
    pools.check("after what came next")
    return {}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "load int64": plain(False, torch.int64),
    "store int64": plain(True, torch.int64),
    "load int32": plain(False, torch.int32),
    "store int32": plain(True, torch.int32),
    "views of one input, load": plain(False, torch.int64, "stacked"),
    "views of one input, store": plain(True, torch.int64, "stacked"),
    "global pools, load": plain(False, torch.int64, where="global"),
    "global pools, store": plain(True, torch.int64, where="global"),
    "module attributes, store": plain(True, torch.int64, where="attribute"),
    "one storage, load": plain(False, torch.int64, "shared"),
    "one storage, store": plain(True, torch.int64, "shared"),
    "several calls": several_calls,
    "split by hand": split_by_hand,
    "made in the graph": made_in_the_graph,
    "a clone as source": a_clone_as_source,
}
if mode == "npugraph" or mode == "make_graphed_callables":
    for other in ("global pools, load", "global pools, store", "module attributes, store"):
        del SCENARIOS[other]
if captures:
    SCENARIOS["CPU ids"] = what_a_graph_refuses
if captures and mode != "torchair":  # which drops the streams of a compiled function
    SCENARIOS["a side stream"] = side_stream
if len(sys.argv) > 2:
    SCENARIOS = {name: SCENARIOS[name] for name in sys.argv[2:]}

if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    if on_npu:
        torch.npu.set_device(0)
    assert npu_kv_ops.__version__
    main()

"""Random programs of swaps and compute: the passes change no value, however late the copies are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graph_programs import Tensors, Traced, leaves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V

from npu_kv_ops.graph_passes.check import Check, Dependences
from npu_kv_ops.graph_passes.merge import Merge
from npu_kv_ops.graph_passes.overlap import Overlap
from npu_kv_ops.graph_passes.reinplace import Reinplace

POOLS, BLOCKS, PAYLOAD = 3, 6, 2
SEPARATE, SHARED, STACKED = "separate", "shared", "stacked"
ops = torch.ops.npu_kv

Step = Callable[[Tensors, Tensors, Tensors, torch.Tensor], Any]


def swap(sources: list[int], store: bool, ids: int, static: bool, cut: bool, split: bool) -> Step:
    """Some host pools and the device pools of the same numbers; or views of their blocks 1 to 5."""

    def step(host: Tensors, device: Tensors, columns: Tensors, x: torch.Tensor) -> Any:
        src, dst = (
            [pools[i][1:6] if cut else pools[i] for i in sources]
            for pools in ((device, host) if store else (host, device))
        )
        pair: tuple[Any, Any] = (columns[ids], columns[1 - ids])
        if static:
            pair = ([0, 2], [1, 3]) if ids else ([4], [2])
        if split:
            ticket = ops.swap_blocks_start(src, dst, *pair)
            x = x * 1.5
            ops.swap_blocks_wait(ticket, src, dst)
        elif static:
            ops.swap_blocks_batch.static(src, dst, *pair)
        else:
            ops.swap_blocks_batch(src, dst, *pair)
        return x

    step.__name__ = f"swap({sources}, {store=}, {ids=}, {static=}, {cut=}, {split=})"
    return step


def compute(kind: str, store: bool, pool: int) -> Step:
    def step(host: Tensors, device: Tensors, columns: Tensors, x: torch.Tensor) -> Any:
        one = (host if store else device)[pool]
        match kind:
            case "read":
                return x + one.sum(0)
            case "read part":
                return x + one[2:4].sum(0)
            case "write":
                one.index_put_((columns[0].clamp(min=0),), x.expand(3, PAYLOAD))
            case "write part":
                one[1:3].mul_(0.5)
            case "add":
                one.add_(x)
            case "fill":
                one.copy_(x.expand(BLOCKS, PAYLOAD))
            case "move":
                one.copy_((device if store else host)[(pool + 1) % POOLS])
            case "old":
                old = one.clone()
                return x + old.mean()
            case "ids":
                columns[0].copy_(columns[1].flip(0))
        return x

    step.__name__ = f"compute({kind!r}, {store=}, {pool=})"
    return step


KINDS = ["read", "read part", "write", "write part", "add", "fill", "move", "old", "ids"]
NUMBERS = st.integers(0, POOLS - 1)
SWAPS = st.builds(
    swap,
    st.lists(NUMBERS, min_size=1, max_size=POOLS, unique=True),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([False, False, True]),
    st.sampled_from([False, False, True]),
    st.sampled_from([False, False, False, True]),
)
STEPS = st.one_of(SWAPS, SWAPS, st.builds(compute, st.sampled_from(KINDS), st.booleans(), NUMBERS))


def arguments(layout: str) -> list[Any]:
    numbers = torch.Generator().manual_seed(3)

    def pools() -> Any:
        if layout == SEPARATE:
            return [torch.randn(BLOCKS, PAYLOAD, generator=numbers) for _ in range(POOLS)]
        stacked = torch.randn(POOLS, BLOCKS, PAYLOAD, generator=numbers)
        return stacked if layout == STACKED else list(stacked.unbind(0))

    ids = [torch.tensor([0, 3, -1]), torch.tensor([4, 1, 2])]
    return [pools(), pools(), ids, torch.ones(PAYLOAD)]


def program(steps: list[Step]) -> Callable[..., torch.Tensor]:
    def run(host: Any, device: Any, ids: Tensors, x: torch.Tensor) -> torch.Tensor:
        if isinstance(host, torch.Tensor):
            host, device = list(host.unbind(0)), list(device.unbind(0))
        for step in steps:
            x = step(host, device, ids, x)
        return x

    return run


def passes(graph: torch.fx.Graph) -> None:
    check = Check()
    check(graph)
    Reinplace()(graph)
    before = Dependences.of(graph)
    for one in (Merge(), Overlap()):
        one(graph)
        check.verify(graph, before)


def passes_and_compiler(graph: torch.fx.Graph) -> None:
    """The passes, and what inductor does behind them to write in place."""
    passes(graph)
    pool = next(iter(graph.nodes)).meta["val"]
    with V.set_fake_mode(pool.fake_mode):
        reinplace_inplaceable_ops(FakeTensorUpdater(graph.owning_module), graph)
        decompose_auto_functionalized(graph)


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps=st.lists(STEPS, min_size=2, max_size=8),
    layout=st.sampled_from([SEPARATE, SHARED, STACKED]),
    behind=st.sampled_from([passes, passes_and_compiler]),
)
def test_the_passes_change_no_value(
    steps: list[Step], layout: str, behind: Callable[[torch.fx.Graph], None]
) -> None:
    function = program(steps)
    expected_arguments = arguments(layout)
    expected = leaves([function(*expected_arguments), expected_arguments])
    traced = Traced(function, behind)
    for late in (False, True):
        found_arguments = arguments(layout)
        found = leaves([traced(*found_arguments, late=late), found_arguments])
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)

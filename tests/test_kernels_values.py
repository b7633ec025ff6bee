"""Every compute operator of the simulated NPU gives what torch gives on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import ALL, CASES, HALVES, Case, compare

pytestmark = pytest.mark.npu

ROOT = Path(__file__).resolve().parent.parent

View = Callable[[torch.Tensor], torch.Tensor]

# From a dense tensor to a larger one that holds it, and the view that takes it out again.
LAYOUTS: dict[str, tuple[View, View]] = {
    "dense": (lambda x: x, lambda x: x),
    "behind others": (lambda x: torch.cat((x[:1], x)), lambda x: x[1:]),
    "every second": (lambda x: torch.stack((x, x), -1).flatten(-2), lambda x: x[..., ::2]),
    "a column": (lambda x: torch.stack((x, x), -1), lambda x: x[..., 0]),
    "turned": (lambda x: x.transpose(0, -1).contiguous(), lambda x: x.transpose(0, -1)),
    "between others": (
        lambda x: torch.nn.functional.pad(x.unsqueeze(0), (1, 1)).squeeze(0),
        lambda x: x[..., 1:-1],
    ),
}


def check(
    case: Case, dtype: torch.dtype, bases: Sequence[torch.Tensor], views: Sequence[View]
) -> None:
    """Calls the case on both devices; compares what it returns and what it leaves behind."""
    on_cpu = [base.clone() for base in bases]
    on_npu = [base.npu() for base in bases]
    expected = case.function(*(view(base) for view, base in zip(views, on_cpu)))
    found = case.function(*(view(base) for view, base in zip(views, on_npu)))
    compare(case, dtype, found, expected)
    for base, reference in zip(on_npu, on_cpu):
        compare(case, dtype, base, reference)


@st.composite
def calls(draw: st.DrawFn, case: Case) -> tuple[Case, torch.dtype, list[torch.Tensor], list[View]]:
    dtype = draw(st.sampled_from(case.dtypes))
    smallest = 0 if case.empty else 1
    extents = draw(st.lists(st.integers(smallest, 4), min_size=5, max_size=5))
    leading = draw(st.lists(st.integers(smallest, 4), max_size=2))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if case.scalars:
        case = case.with_scalar(draw(st.sampled_from(case.scalars)))
    bases, views = [], []
    for tensor in case.tensors(random, dtype, leading, extents):
        names = list(LAYOUTS) if tensor.dim() > 0 and tensor.numel() > 0 else ["dense"]
        put_in, take_out = LAYOUTS[draw(st.sampled_from(names))]
        bases.append(put_in(tensor))
        views.append(take_out)
    return case, dtype, bases, views


def plain_cases() -> list[Case]:
    return [case.with_scalar(case.scalars[0]) if case.scalars else case for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_the_cpu(case: Case, npu: torch.device) -> None:
    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(calls(case))
    def examples(call: tuple[Case, torch.dtype, list[torch.Tensor], list[View]]) -> None:
        check(*call)

    examples()


def test_every_dtype_of_every_case(npu: torch.device) -> None:
    # Hypothesis samples; this visits them all.
    for case in plain_cases():
        for dtype in case.dtypes:
            random = torch.Generator().manual_seed(7)
            bases = case.tensors(random, dtype, (2,), (3, 4, 5, 2, 3))
            check(case, dtype, bases, [lambda x: x] * len(bases))


def test_the_cases_reach_every_operator(sim: ModuleType, npu: torch.device) -> None:
    for case in plain_cases():
        random = torch.Generator().manual_seed(7)
        # Two axes for those that need two even extents.
        for extents in ((3, 4, 5, 2, 3), (1, 2, 3, 64, 2)):
            tensors = case.tensors(random, case.dtypes[0], (2,), extents)
            case.function(*(tensor.npu() for tensor in tensors))
    # As they are printed, and what has no equal on the CPU.
    torch.npu.synchronize()
    random_operators = {
        "DropOutDoMask",
        "MultinomialWithReplacement",
        "StatelessBernoulli",
        "StatelessDropOutGenMask",
        "StatelessRandomNormalV2",
        "StatelessRandomUniformV2",
        "StatelessRandperm",
    }
    reached = set(sim.stats().operators)
    # Tests of other modules register operators of their own.
    known = {name for name in sim.operators() if not name.startswith("Test")}
    assert known - reached - random_operators == set()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_tensors_print_as_on_the_cpu(dtype: torch.dtype, npu: torch.device) -> None:
    for shape in [(), (3,), (2, 3), (0, 2)]:
        x = (torch.arange(6)[: torch.Size(shape).numel()].reshape(shape) - 2).to(dtype)
        assert repr(x.npu()).replace(", device='npu:0'", "") == repr(x)


def test_an_operator_in_place_leaves_its_surroundings_alone(npu: torch.device) -> None:
    for dtype in HALVES:
        x = torch.arange(24, dtype=dtype).reshape(4, 6)
        y = x.npu()
        for tensor in (x, y):
            tensor[1:3, 2:4].mul_(2)
            tensor[:, 5].fill_(-1)
            tensor.t()[0].add_(tensor[:, 1])
        assert torch.equal(y.cpu(), x)


# Views of flat memory, as caches of other dtypes are made from one raw buffer.
PARTS: dict[str, View] = {
    "dense": lambda x: x,
    "the last few": lambda x: x[-24:],
    "every second": lambda x: x[::2],
    "last columns": lambda x: x.view(16, -1)[:, -3:],
    "turned": lambda x: x.view(16, -1)[3:].t(),
    "keys": lambda x: x.view(8, 2, 4, -1)[:, 0],
    "values": lambda x: x.view(8, 2, 4, -1)[:, 1],
    "values of planes": lambda x: x.view(2, 8, 4, -1)[1, 2:].transpose(0, 1),
}

DTYPE_VIEWS = [
    (torch.int8, torch.int64),
    (torch.uint8, torch.float32),
    (torch.int8, torch.bfloat16),
    (torch.bfloat16, torch.int64),
    (torch.float32, torch.float16),
    (torch.int64, torch.int8),
]


def use_views(part: View, raw: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a cache of ``dtype`` in the memory of ``raw`` goes through, and what is in raw then."""
    x = part(raw.view(dtype))
    rows = torch.tensor([x.shape[0] - 1, 0], device=raw.device)
    found = [x.clone(), x.contiguous(), x + 1, x.to(torch.float32), x[rows], (x > 1).float().sum()]
    found.append(torch.empty(x.shape, dtype=dtype, device=raw.device).copy_(x))
    found.append(raw.view(dtype)[: x.numel()].view(x.shape).copy_(x.flip(0)).clone())
    x[rows] = x.index_select(0, rows.flip(0)).clone()
    x[:1].fill_(3)
    x[1:2].copy_(torch.arange(x[1].numel(), device=raw.device).view_as(x[1:2]))
    x.mul_(2)
    return [*found, raw]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """So that a NaN equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("stored", "seen"), DTYPE_VIEWS, ids=str)
def test_views_of_another_dtype(
    stored: torch.dtype, seen: torch.dtype, part: str, npu: torch.device
) -> None:
    # Counted in elements of the wrong dtype, half a MiB would leave a block of torch_npu's pool.
    random = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 60, (1 << 19,), generator=random, dtype=torch.uint8)
    on_npu = raw.view(stored).npu()
    expected = use_views(PARTS[part], raw.view(stored).clone(), seen)
    found = use_views(PARTS[part], on_npu, seen)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(as_bytes(one.cpu()), as_bytes(other))


def test_a_cache_in_a_raw_buffer_with_memory_of_its_own(npu: torch.device) -> None:
    raw = torch.arange(3 << 20, dtype=torch.int32).view(torch.int8)
    on_npu = raw.npu()
    expected, found = (x.view(torch.bfloat16).view(64, 2, -1) for x in (raw, on_npu))
    for plane in (0, 1):
        copy = found[:, plane].clone().cpu()
        assert torch.equal(as_bytes(copy), as_bytes(expected[:, plane]))


def test_overlapping_source_and_destination(npu: torch.device) -> None:
    x = torch.arange(10.0)
    y = x.npu()
    y[1:].copy_(y[:-1].clone())
    expected = torch.cat((x[:1], x[:-1]))
    assert torch.equal(y.cpu(), expected)


def test_the_documentation_lists_every_operator(sim: ModuleType) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    listed = text.split("### The list")[1].split("### Rules")[0]
    documented = re.findall(r"`([A-Z]\w+)`", listed)
    known = [name for name in sim.operators() if not name.startswith("Test")]
    assert documented == known

"""Random numbers of the simulated NPU: their range, their spread, and that a seed repeats them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from kernel_cases import FLOATS

pytestmark = pytest.mark.npu

COUNT = 20000


@pytest.fixture(autouse=True)
def _seed(npu: torch.device) -> None:
    torch.npu.manual_seed(1)


GENERATORS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(50, device="npu"),
    "randn": lambda: torch.randn(50, device="npu"),
    "randint": lambda: torch.randint(0, 100, (50,), device="npu"),
    "randperm": lambda: torch.randperm(50, device="npu"),
    "bernoulli": lambda: torch.empty(50, device="npu").bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(50, device="npu"), 20),
    "dropout": lambda: F.dropout(torch.ones(50, device="npu")),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_repeats_the_numbers_and_a_call_does_not(name: str) -> None:
    first, second = GENERATORS[name]().cpu(), GENERATORS[name]().cpu()
    assert not torch.equal(first, second)
    torch.npu.manual_seed(1)
    assert torch.equal(GENERATORS[name]().cpu(), first)
    torch.npu.manual_seed(2)
    assert not torch.equal(GENERATORS[name]().cpu(), first)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    x = torch.rand(COUNT, dtype=dtype, device="npu").cpu().float()
    assert x.min() >= 0
    assert x.max() < 1
    counts = x.histc(10, 0, 1)
    assert counts.min() > 0.08 * COUNT
    assert counts.max() < 0.12 * COUNT
    y = torch.empty(COUNT, dtype=dtype, device="npu").uniform_(-2, 6).cpu().float()
    assert y.min() >= -2
    assert y.max() <= 6
    assert y.mean() == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(COUNT, dtype=dtype, device="npu").cpu().float()
    assert x.mean() == pytest.approx(0, abs=0.05)
    assert x.std() == pytest.approx(1, abs=0.05)
    assert (x.abs() < 1).float().mean() == pytest.approx(0.683, abs=0.02)
    y = torch.empty(COUNT, dtype=dtype, device="npu").normal_(3, 2).cpu().float()
    assert y.mean() == pytest.approx(3, abs=0.1)
    assert y.std() == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_whole_numbers(dtype: torch.dtype) -> None:
    # From 0 on: torch_npu truncates here, so that of a range around zero the zero comes twice.
    x = torch.randint(0, 8, (COUNT,), dtype=dtype, device="npu").cpu()
    assert x.dtype == dtype
    counts = x.bincount()
    assert len(counts) == 8
    assert counts.min() > 0.1 * COUNT


def test_a_permutation_holds_every_number_once() -> None:
    x = torch.randperm(1000, device="npu").cpu()
    assert torch.equal(x.sort().values, torch.arange(1000))
    assert not torch.equal(x, torch.arange(1000))


def test_bernoulli_and_dropout_keep_their_share() -> None:
    ones = torch.empty(COUNT, device="npu").bernoulli_(0.3).cpu()
    assert set(ones.tolist()) == {0.0, 1.0}
    assert ones.mean() == pytest.approx(0.3, abs=0.02)
    kept = F.dropout(torch.ones(COUNT, device="npu"), 0.25).cpu()
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert kept.ne(0).float().mean() == pytest.approx(0.75, abs=0.02)


def test_multinomial_follows_its_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0], device="npu")
    x = torch.multinomial(weights, COUNT, replacement=True).cpu()
    assert x.bincount()[0] == 0
    assert x.eq(2).float().mean() == pytest.approx(0.75, abs=0.02)
    drawn = torch.multinomial(torch.ones(8, device="npu"), 8).cpu()
    assert torch.equal(drawn.sort().values, torch.arange(8))

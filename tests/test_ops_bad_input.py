"""Every argument that the operator must refuse, on the host and on an NPU: nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from block_reference import assert_same, content, make_pool
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_kv_ops import ops

swap = torch.ops.npu_kv.swap_blocks_batch
PLACES = [
    "h2h",
    pytest.param("h2d", marks=pytest.mark.npu),
    pytest.param("d2h", marks=pytest.mark.npu),
    pytest.param("d2d", marks=pytest.mark.npu),
]


class Pools:
    """Two lists of two tensors in the places that a direction such as ``h2d`` says."""

    def __init__(self, direction: str) -> None:
        self.src_device = "npu:0" if direction[0] == "d" else "cpu"
        self.dst_device = "npu:0" if direction[2] == "d" else "cpu"
        self.pin = "d" in direction
        self.src = [self.make_src(seed=1), self.make_src(seed=2)]
        self.dst = [self.make_dst(seed=3), self.make_dst(seed=4)]

    def make_src(self, blocks: int = 8, payload: Any = (4,), **kind: Any) -> torch.Tensor:
        return make_pool(blocks, payload, device=self.src_device, pin=self.pin, **kind)

    def make_dst(self, blocks: int = 6, payload: Any = (4,), **kind: Any) -> torch.Tensor:
        return make_pool(blocks, payload, device=self.dst_device, pin=self.pin, **kind)


@pytest.fixture(params=PLACES)
def pools(request: pytest.FixtureRequest) -> Pools:
    return Pools(request.param)


@pytest.fixture
def unchanged(pools: Pools) -> Iterator[None]:
    """No byte of the pools may differ after the test, and no call may have been counted."""
    if pools.pin:
        torch.npu.synchronize()
    before = content(pools.src + pools.dst)
    ops.reset_stats()
    yield
    if pools.pin:
        torch.npu.synchronize()
    assert_same(content(pools.src + pools.dst), before)
    assert ops.stats().calls == 0
    ops.raise_pending_errors()


def ids(*values: float) -> torch.Tensor:
    return torch.tensor(values)


BAD_IDS = {
    "source beyond": (
        [0, 8],
        [0, 1],
        IndexError,
        r"src_blocks\[1\] is 8, out of range for src\[0\] with 8 blocks",
    ),
    "destination beyond": (
        [0, 1],
        [6, 1],
        IndexError,
        r"dst_blocks\[0\] is 6, out of range for dst\[0\] with 6 blocks",
    ),
    "far beyond": ([2**62], [0], IndexError, r"src_blocks\[0\] is 4611686018427387904"),
    "destination twice": (
        [0, 1, 2],
        [3, 1, 3],
        ValueError,
        r"dst_blocks\[2\] is 3, which dst_blocks\[0\] named already",
    ),
    "lengths": ([0, 1], [1], ValueError, "src_blocks has 2 elements and dst_blocks has 1"),
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("way", ["int64", "int32", "static", "python"])
@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids(pools: Pools, case: str, way: str) -> None:
    src_ids, dst_ids, kind, text = BAD_IDS[case]
    call: Callable[..., Any] = {"static": swap.static, "python": ops.swap_blocks_batch}.get(
        way, swap
    )
    if way.startswith("int"):
        if way == "int32" and case == "far beyond":
            src_ids, text = [2**31 - 1], r"src_blocks\[0\] is 2147483647"
        dtype = getattr(torch, way)
        src_ids, dst_ids = (torch.tensor(one, dtype=dtype) for one in (src_ids, dst_ids))
    with pytest.raises(kind, match=text):
        call(pools.src, pools.dst, src_ids, dst_ids)


@pytest.mark.usefixtures("unchanged")
def test_the_smallest_tensor_of_a_list_limits_the_ids(pools: Pools) -> None:
    smaller = pools.make_dst(3)
    with pytest.raises(IndexError, match=r"dst_blocks\[0\] is 3, out of range for dst\[1\] with 3"):
        swap(pools.src, [pools.dst[0], smaller], ids(0), ids(3))
    with pytest.raises(IndexError, match=r"is 0, out of range for dst\[0\] with 0 blocks$"):
        swap(pools.src[:1], [pools.make_dst(0)], ids(0), ids(0))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("which", ["src_blocks", "dst_blocks"])
@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        (torch.tensor([0.0]), TypeError, "has dtype Float; block ids are int32 or int64"),
        (torch.tensor([True]), TypeError, "has dtype Bool"),
        (torch.tensor([0], dtype=torch.int16), TypeError, "has dtype Short"),
        (torch.tensor([[0]]), ValueError, "has 2 dimensions; block ids are a 1-D tensor"),
        (torch.tensor(0), ValueError, "has 0 dimensions"),
        (torch.tensor([0]).to_sparse(), TypeError, "has layout Sparse"),
    ],
    ids=["float", "bool", "int16", "2-D", "0-D", "sparse"],
)
def test_bad_id_tensors(
    pools: Pools, which: str, bad: torch.Tensor, kind: type[Exception], text: str
) -> None:
    pair = (bad, ids(0)) if which == "src_blocks" else (ids(0), bad)
    with pytest.raises(kind, match=f"{which} {text}"):
        swap(pools.src, pools.dst, *pair)


BAD_KINDS = {
    "src tensor": ({"src": lambda pools: pools.src[0]}, TypeError, "src must be a list of tensors"),
    "dst none": ({"dst": lambda _: None}, TypeError, "dst must be a list of tensors, got NoneType"),
    "src dict": ({"src": lambda _: {}}, TypeError, "src must be a list of tensors, got dict"),
    "src[1]": (
        {"src": lambda pools: [pools.src[0], 3]},
        TypeError,
        r"src\[1\] must be a tensor, got int",
    ),
    "dst[0]": (
        {"dst": lambda pools: [None, pools.dst[0]]},
        TypeError,
        r"dst\[0\] must be a tensor, got NoneType",
    ),
    "id": ({"src_blocks": lambda _: 0}, TypeError, "src_blocks must be .* a list of int, got int"),
    "text": ({"dst_blocks": lambda _: "12"}, TypeError, "dst_blocks must be .*, got str"),
    "one list": (
        {"dst_blocks": lambda _: torch.tensor([1, 2])},
        TypeError,
        "src_blocks is a list and dst_blocks is a Tensor: pass both as",
    ),
    "float": (
        {"src_blocks": lambda _: [0, 1.0]},
        TypeError,
        r"src_blocks\[1\] is 1.0; block ids are int",
    ),
    "nested": ({"dst_blocks": lambda _: [[0], [1]]}, TypeError, r"dst_blocks\[0\] is \[0\]; block"),
    "large": (
        {"src_blocks": lambda _: [0, 2**63]},
        IndexError,
        r"src_blocks\[1\] is 9223372036854775808, which exceeds 64 bits",
    ),
    "small": (
        {"dst_blocks": lambda _: [-(2**63) - 1, 0]},
        IndexError,
        r"dst_blocks\[0\] is -9223372036854775809, which exceeds 64 bits",
    ),
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("case", BAD_KINDS)
def test_arguments_of_another_kind(pools: Pools, case: str) -> None:
    wrong, kind, text = BAD_KINDS[case]
    arguments: dict[str, Any] = {"src": pools.src, "dst": pools.dst}
    arguments |= {"src_blocks": [0, 1], "dst_blocks": [2, 3]}
    arguments |= {name: make(pools) for name, make in wrong.items()}
    with pytest.raises(kind, match=f"^{text}"):
        ops.swap_blocks_batch(**arguments)


def test_numbers_that_python_takes_for_int_are_ids(pools: Pools) -> None:
    before = pools.src[0][1].cpu()
    ops.swap_blocks_batch(pools.src, pools.dst, range(1, 2), [torch.tensor(3)])  # type: ignore[list-item]
    if pools.pin:
        torch.npu.synchronize()
    assert torch.equal(pools.dst[0][3].cpu(), before)


@pytest.mark.npu
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("which", [0, 1])
def test_ids_on_different_devices(pools: Pools, which: int) -> None:
    pair = [ids(0), ids(1)]
    pair[which] = pair[which].to("npu")
    with pytest.raises(ValueError, match="they must be on one device"):
        swap(pools.src, pools.dst, *pair)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in one] for one in (pools.src, pools.dst)]
        with pytest.raises(ValueError, match="they must be on one"):
            swap(*fakes, *(mode.from_tensor(one) for one in pair))


@pytest.mark.usefixtures("unchanged")
def test_lists_of_different_length(pools: Pools) -> None:
    with pytest.raises(ValueError, match="src has 2 tensors and dst has 1"):
        swap(pools.src, pools.dst[:1], ids(0), ids(0))
    with pytest.raises(ValueError, match="src has 0 tensors and dst has 2"):
        swap.static([], pools.dst, [0], [0])


@pytest.mark.usefixtures("unchanged")
def test_pairs_that_differ(pools: Pools) -> None:
    with pytest.raises(ValueError, match=r"block of src\[1\] has 16 bytes.*dst\[1\] has 20;"):
        swap(pools.src, [pools.dst[0], pools.make_dst(6, (5,))], ids(0), ids(0))
    with pytest.raises(TypeError, match=r"src\[1\] has dtype Float and dst\[1\] has dtype Int"):
        swap(pools.src, [pools.dst[0], pools.make_dst(dtype=torch.int32)], ids(0), ids(0))


@pytest.mark.usefixtures("unchanged")
def test_tensors_that_have_no_blocks(pools: Pools) -> None:
    wide = pools.make_dst(6, (8,))
    holes, turned = wide[:, ::2], pools.make_dst(4, (6,)).t()
    overlapping = wide.as_strided((6, 4), (3, 1))
    with pytest.raises(
        ValueError, match=r"dst\[0\] has shape \[6, 4\] and strides \[8, 2\]: the pay"
    ):
        swap(pools.src[:1], [holes], ids(0), ids(0))
    with pytest.raises(
        ValueError, match=r"dst\[0\] has shape \[6, 4\] and strides \[1, 6\]: the pay"
    ):
        swap(pools.src[:1], [turned], ids(0), ids(0))
    with pytest.raises(ValueError, match=r"stride\(0\) must be at least the payload of 4 elements"):
        swap(pools.src[:1], [overlapping], ids(0), ids(0))
    with pytest.raises(ValueError, match=r"stride\(0\) must be at least"):
        swap([pools.src[0][:1].expand(8, 4)], pools.dst[:1], ids(0), ids(0))
    with pytest.raises(ValueError, match=r"src\[0\] has no dimension"):
        swap([pools.src[0][0, 0]], pools.dst[:1], ids(0), ids(0))


@pytest.mark.usefixtures("unchanged")
def test_memory_that_is_gone(pools: Pools) -> None:
    freed, shrunk = (make_pool(6, (4,), device=pools.dst_device) for _ in range(2))
    freed.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(shrunk.untyped_storage().nbytes() - 4)
    for tensor in (freed, shrunk):
        with pytest.raises(ValueError, match=r"dst\[0\] spans .* bytes of its storage"):
            swap(pools.src[:1], [tensor], ids(0), ids(0))
        with pytest.raises(ValueError, match=r"dst\[0\] spans .* bytes of its storage"):
            swap.static(pools.src[:1], [tensor], [], [])


@pytest.mark.usefixtures("unchanged")
def test_a_destination_that_two_tensors_name(pools: Pools) -> None:
    both_written = r"block 2 of dst\[0\] and block 2 of dst\[1\] are both written"
    with pytest.raises(ValueError, match=both_written):
        swap(pools.src, [pools.dst[0], pools.dst[0]], ids(0), ids(2))
    later = pools.dst[0][1:]
    with pytest.raises(ValueError, match=r"block 3 of dst\[0\] and block 2 of dst\[1\]"):
        swap(pools.src, [pools.dst[0], later], ids(0, 1), ids(2, 3))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "pools", ["h2h", pytest.param("d2d", marks=pytest.mark.npu)], indirect=True
)
def test_a_block_that_is_read_and_written(pools: Pools) -> None:
    for src_ids, dst_ids in ([3], [3]), ([0, 1], [1, 2]):
        with pytest.raises(ValueError, match="is read and shares memory with block"):
            swap(pools.src, pools.src, torch.tensor(src_ids), torch.tensor(dst_ids))
    with pytest.raises(ValueError, match=r"block 3 of src\[0\] is read.* block 1 of dst\[0\]"):
        swap(pools.src[:1], [pools.src[0][2:]], ids(3), ids(1))


@pytest.mark.npu
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_mixed_devices_in_a_list(pools: Pools, other: str) -> None:
    if other != str(pools.dst[0].device):
        with pytest.raises(ValueError, match=rf"dst\[1\] is on {other} and dst\[0\] on "):
            swap(pools.src, [pools.dst[0], make_pool(6, (4,), device=other)], ids(0), ids(0))
    if other != str(pools.src[0].device):
        with pytest.raises(ValueError, match=rf"src\[1\] is on {other} and src\[0\] on "):
            swap([pools.src[0], make_pool(8, (4,), device=other)], pools.dst, ids(0), ids(0))


@pytest.mark.npu
def test_two_npus() -> None:
    src, dst = make_pool(4, device="npu:0"), make_pool(4, device="npu:1", seed=1)
    before = content([dst])
    with pytest.raises(ValueError, match="src is on npu:0 and dst is on npu:1"):
        swap([src], [dst], ids(0), ids(0))
    assert_same(content([dst]), before)


def test_fake_tensors_are_checked_too() -> None:
    """What fails here stops a compilation, where a failure at capture would break the graph."""
    src, dst = make_pool(8, (4,)), make_pool(6, (4,))
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(src), mode.from_tensor(dst)
        i = mode.from_tensor(ids(0))
        swap([a], [b], i, i)
        swap.static([a], [b], [0], [0])
        swap([], [], i, i)
        with pytest.raises(ValueError, match="src has 1 tensors and dst has 2"):
            swap([a], [b, b], i, i)
        with pytest.raises(ValueError, match="equally long"):
            swap.static([a], [b], [0], [0, 1])
        with pytest.raises(ValueError, match="equally long"):
            swap([a], [b], i, mode.from_tensor(ids(0, 1)))
        with pytest.raises(TypeError, match="block ids are int32 or int64"):
            swap([a], [b], i.float(), i)
        with pytest.raises(TypeError, match="must be equal"):
            swap([a], [b.int()], i, i)
        with pytest.raises(ValueError, match="must be equal"):
            swap([a], [b.new_empty(6, 5)], i, i)
        with pytest.raises(ValueError, match="must be contiguous"):
            swap([a], [b.new_empty(6, 8)[:, ::2]], i, i)
        with pytest.raises(ValueError, match="has no dimension"):
            swap([a[0, 0]], [b], i, i)
        p = mode.from_tensor(ids(1, 2))
        swap(p, p, p, 1)
        with pytest.raises(ValueError, match="direction is 3"):
            swap(p, p, p, 3)
        with pytest.raises(TypeError, match="src_ptrs has dtype Float"):
            swap(p.float(), p, p, 1)


POINTERS = {
    "direction": ((ids(1), ids(1), ids(1), 3), ValueError, "direction is 3; allowed are 0"),
    "negative direction": ((ids(1), ids(1), ids(1), -1), ValueError, "direction is -1"),
    "dtype": ((ids(1).int(), ids(1), ids(1), 0), TypeError, "src_ptrs has dtype Int"),
    "dtype of sizes": ((ids(1), ids(1), ids(1.0), 0), TypeError, "sizes has dtype Float"),
    "strided": (
        (ids(1, 2), ids(1, 2, 3, 4)[::2], ids(0, 0), 0),
        ValueError,
        "dst_ptrs has stride 2",
    ),
    "2-D": ((ids(1)[None], ids(1), ids(1), 0), ValueError, "src_ptrs has 2 dimensions"),
    "lengths": ((ids(1, 2), ids(1), ids(1), 0), ValueError, "src_ptrs has 2 elements and dst_ptrs"),
    "lengths of sizes": ((ids(1), ids(1), ids(1, 1), 0), ValueError, "and sizes has 2"),
}


@pytest.mark.parametrize("case", POINTERS)
def test_bad_arguments_of_ptrs(case: str) -> None:
    arguments, kind, text = POINTERS[case]
    with pytest.raises(kind, match=text):
        swap(*arguments)


def test_ptrs_need_an_npu(process_runtime: str) -> None:
    if process_runtime == "host":
        with pytest.raises(
            RuntimeError, match=r"NPU library of npu_kv_ops, which is not|not loaded"
        ):
            swap(ids(1), ids(1), ids(1), 0)


@pytest.mark.npu
def test_bad_pointers() -> None:
    host, device = make_pool(4, pin=True), make_pool(4, device="npu", seed=1)
    other = make_pool(4, device="npu:1")
    before = content([device, host, other])
    h, d = host.data_ptr(), device.data_ptr()
    good = [(h, d, 24), (h + 24, d + 24, 0)]

    def refused(*items: tuple[int, int, int], text: str, direction: int = 0) -> None:
        src, dst, sizes = (torch.tensor(one) for one in zip(*good, *items, strict=True))
        with pytest.raises(ValueError, match=text):
            swap(src, dst, sizes, direction)

    refused((h, d, -1), text=r"sizes\[2\] is -1; a size may not be negative")
    refused((0, d, 8), text=r"src_ptrs\[2\] is null with a size of 8")
    refused((h, 0, 8), text=r"dst_ptrs\[2\] is null")
    refused((h, h, 8), text=r"dst_ptrs\[2\]: the 8 bytes at .* do not lie in device memory")
    refused((d, d, 8), text=r"src_ptrs\[2\]: the 8 bytes at .* do not lie in host memory")
    refused((h, 12345, 8), text=r"dst_ptrs\[2\]: .* do not lie in device memory")
    refused((h, d, 1 << 40), text=r"src_ptrs\[2\]: the 1099511627776 bytes .* in host memory")
    refused((d, d + 24, 1 << 40), text=r"src_ptrs\[0\]: .* in device memory", direction=2)
    refused(
        (h, other.data_ptr(), 8), text=r"dst_ptrs\[2\]: .* lie on npu:1, other addresses.*npu:0"
    )
    refused((h, d, 8), text=r"src_ptrs\[0\]: .* do not lie in device memory", direction=1)
    refused((h, d, 8), text=r"src_ptrs\[0\]: .* do not lie in device memory", direction=2)
    npu_ids = ids(1).to("npu")
    with pytest.raises(ValueError, match="src_ptrs is not on the CPU"):
        swap(npu_ids, ids(1), ids(1), 0)
    torch.npu.synchronize()
    ops.raise_pending_errors()
    assert_same(content([device, host, other]), before)

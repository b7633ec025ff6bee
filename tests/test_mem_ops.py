"""The drop-in for vLLM-Ascend's npu_mem_ops: same names, same meaning, our checks."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from block_reference import assert_same, content, expected_content, make_pool

from npu_kv_ops import mem_ops, ops
from npu_kv_ops.mem_ops import (
    DIRECTION_D2H,
    DIRECTION_H2D,
    BatchMemcpyParams,
    BatchMemcpyWorkspace,
    build_params,
    copy_blocks,
)

NAMES = ["layer.0.k", "layer.0.v", "layer.1.latent"]
SIZES = [16, 16, 40]


def caches(blocks: int, seed: int, **where: Any) -> dict[str, torch.Tensor]:
    return {
        name: make_pool(blocks, (size,), dtype=torch.int8, seed=seed + i, **where)
        for i, (name, size) in enumerate(zip(NAMES, SIZES, strict=True))
    }


def test_names_and_arguments_are_the_original_ones() -> None:
    assert (DIRECTION_H2D, DIRECTION_D2H) == (0, 1)
    assert list(inspect.signature(build_params).parameters) == [
        "src_caches",
        "dst_caches",
        "direction",
    ]
    assert list(inspect.signature(copy_blocks).parameters) == [
        "src_block_ids",
        "dst_block_ids",
        "params",
        "workspace",
    ]
    assert {"num_sub_tensors", "direction", "bpb"} <= set(BatchMemcpyParams._fields)
    assert set(mem_ops.__all__) >= {"BatchMemcpyParams", "build_params", "copy_blocks"}


def test_params_describe_the_tensors() -> None:
    src, dst = caches(8, 0), caches(5, 10)
    params = build_params(src, dst, DIRECTION_H2D)
    assert params.num_sub_tensors == 3
    assert params.direction == DIRECTION_H2D
    assert list(params.bpb) == SIZES
    assert params.src_bases == [tensor.data_ptr() for tensor in src.values()]
    assert params.dst_bases == [tensor.data_ptr() for tensor in dst.values()]


@pytest.mark.parametrize("workspace", [None, BatchMemcpyWorkspace()])
@pytest.mark.parametrize("direction", [DIRECTION_H2D, DIRECTION_D2H])
def test_blocks_are_copied_on_the_host(
    direction: int, workspace: BatchMemcpyWorkspace | None
) -> None:
    src, dst = caches(8, 0), caches(5, 10)
    wanted = expected_content(list(src.values()), list(dst.values()), [7, 0, 1], [2, 3, 4])
    copy_blocks([7, 0, 1], [2, 3, 4], build_params(src, dst, direction), workspace)
    assert_same(content(list(dst.values())), wanted)


@pytest.mark.npu
@pytest.mark.parametrize("direction", [DIRECTION_H2D, DIRECTION_D2H])
def test_blocks_are_copied_on_the_current_stream(
    sim: ModuleType, npu: torch.device, direction: int
) -> None:
    sides = [caches(8, 0, pin=True), caches(8, 10, device=npu)]
    src, dst = sides if direction == DIRECTION_H2D else sides[::-1]
    wanted = expected_content(list(src.values()), list(dst.values()), [5, 6, 1], [0, 1, 7])
    params = build_params(src, dst, direction)
    side = torch.npu.Stream()
    handle = side.npu_stream
    src_ids, dst_ids = [5, 6, 1], [0, 1, 7]
    torch.npu.synchronize()
    sim.reset_stats()
    with sim.timeline() as tasks:
        with torch.npu.stream(side):
            copy_blocks(src_ids, dst_ids, params)
        src_ids.clear()  # the lists are the caller's again
        torch.npu.synchronize()
    assert {task.handle for task in tasks if task.kind in ("copy", "batch")} == {handle}
    assert_same(content(list(dst.values())), wanted)
    key = "h2d" if direction == DIRECTION_H2D else "d2h"
    assert sim.stats().copies[key] == 2 * 3, "two runs in each of three tensors"


def test_nothing_to_copy() -> None:
    src, dst = caches(8, 0), caches(5, 10)
    ops.reset_stats()
    copy_blocks([], [], build_params(src, dst, DIRECTION_H2D))
    copy_blocks([1], [1], build_params({}, {}, DIRECTION_D2H))
    assert ops.stats().calls == 0


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "kind", "text"),
    [
        ([8], [0], IndexError, r"src_blocks\[0\] is 8"),
        ([0], [5], IndexError, r"dst_blocks\[0\] is 5"),
        ([0, 1], [2, 2], ValueError, "named already"),
        ([0, 1], [2], ValueError, "equally long"),
        ([], [2], ValueError, "equally long"),
        ([0.5], [2], TypeError, "integer"),
    ],
)
def test_bad_ids_copy_nothing(
    src_ids: list[Any], dst_ids: list[Any], kind: type[Exception], text: str
) -> None:
    src, dst = caches(8, 0), caches(5, 10)
    params = build_params(src, dst, DIRECTION_H2D)
    before = content(list(dst.values()))
    with pytest.raises(kind, match=text):
        copy_blocks(src_ids, dst_ids, params)
    assert_same(content(list(dst.values())), before)


def test_bad_caches_are_refused_when_the_params_are_built() -> None:
    src, dst = caches(8, 0), caches(5, 10)
    with pytest.raises(ValueError, match=r"direction is 2; allowed are DIRECTION_H2D \(0\)"):
        build_params(src, dst, 2)
    with pytest.raises(ValueError, match="same keys in the same order"):
        build_params(src, dict(reversed(dst.items())), DIRECTION_H2D)
    with pytest.raises(ValueError, match="same keys"):
        build_params(src, {name: dst[name] for name in NAMES[:2]}, DIRECTION_H2D)
    with pytest.raises(ValueError, match=r"block of src\[1\] has 16 bytes"):
        build_params(src, {**dst, "layer.0.v": make_pool(5, (8,), dtype=torch.int8)}, 0)
    with pytest.raises(TypeError, match="dtype"):
        build_params(src, {**dst, "layer.0.v": dst["layer.0.v"].to(torch.uint8)}, 0)


@pytest.mark.npu
def test_devices_must_fit_the_direction(npu: torch.device) -> None:
    host, device = caches(8, 0, pin=True), caches(8, 10, device=npu)
    with pytest.raises(ValueError, match=r"src_caches\['layer.0.k'\] is on cpu.* wants it on npu"):
        build_params(host, device, DIRECTION_D2H)
    with pytest.raises(ValueError, match=r"src_caches\['layer.0.k'\] is on npu:0.* on cpu"):
        build_params(device, host, DIRECTION_H2D)
    with pytest.raises(ValueError, match=r"src_caches\['layer.0.k'\] is on npu:0"):
        build_params(device, device, DIRECTION_H2D)
    mixed = {**device, "layer.0.v": host["layer.0.v"]}
    with pytest.raises(ValueError, match=r"dst_caches\['layer.0.v'\] is on cpu"):
        build_params(host, mixed, DIRECTION_H2D)

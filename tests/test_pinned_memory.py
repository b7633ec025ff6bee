"""empty_pinned and host_mirror: exact size, whole blocks in every piece, freed on every path."""

from __future__ import annotations

import ctypes
import gc
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import eventually

from npu_kv_ops import (
    block_views,
    empty_pinned,
    host_mirror,
    pinned_memory,
    raise_pending_errors,
    runtime,
    swap_blocks_batch,
)
from npu_kv_ops.pinned_memory import pinned_bytes

MIB = 1 << 20


def live(sim: ModuleType) -> tuple[int, int, int]:
    """Pinned bytes, pinned allocations and registered ranges that the runtime holds."""
    now: Any = sim.stats().live
    return now["pinned_bytes"], now["pinned_allocations"], now["registered_ranges"]


def views_of(*payloads: int, blocks: int = 4) -> dict[str, torch.Tensor]:
    return {f"v{i}": torch.zeros(blocks, p, dtype=torch.int8) for i, p in enumerate(payloads)}


# --------------------------------------------------------------------------- on every runtime


@pytest.mark.parametrize("shape", [(3, 5, 7), (4,), 4, (1, 9), (), (0, 3), (3, 0), torch.Size([2])])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.complex64, torch.bool])
def test_shape_and_dtype(shape: Any, dtype: torch.dtype) -> None:
    tensor = empty_pinned(shape, dtype)
    expected = torch.empty(shape, dtype=dtype)
    assert tensor.shape == expected.shape
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    tensor.fill_(1)
    assert bool((tensor == 1).all())


def test_default_dtype_is_bytes() -> None:
    assert empty_pinned((2, 3)).dtype == torch.int8


def test_modes_do_not_leak_into_the_tensor() -> None:
    with torch.inference_mode(), torch.device("meta"):
        tensor = empty_pinned((2, 3))
    assert tensor.device.type == "cpu"
    assert not tensor.is_inference()
    tensor.zero_()


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        (-1, torch.int8, ValueError),
        ((2, -3), torch.int8, ValueError),
        ((2, 3.0), torch.int8, TypeError),
        (True, torch.int8, TypeError),
        ((True, 2), torch.int8, TypeError),
        ("23", torch.int8, TypeError),
        (2.0, torch.int8, TypeError),
        ((2, 3), "int8", TypeError),
    ],
)
def test_bad_shape_or_dtype(shape: Any, dtype: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"shape|dtype"):
        empty_pinned(shape, dtype)


def test_mirror_has_the_names_order_and_payloads_of_the_views() -> None:
    views = {
        "b": torch.zeros(4, 40, dtype=torch.int8).as_strided((4, 24), (40, 1)),
        "a": torch.zeros(4, 3, 5, dtype=torch.float16),
        "c": torch.zeros(4),
    }
    mirror = host_mirror(views, 9)
    assert list(mirror) == ["b", "a", "c"]
    assert {n: (tuple(m.shape), m.dtype) for n, m in mirror.items()} == {
        "b": ((9, 24), torch.int8),
        "a": ((9, 3, 5), torch.float16),
        "c": ((9,), torch.float32),
    }
    storages = {m.untyped_storage().data_ptr() for m in mirror.values()}
    assert len(storages) == 3
    assert all(m.is_contiguous() for m in mirror.values())


def test_mirror_of_nothing() -> None:
    assert host_mirror({}, 3) == {}


@pytest.mark.parametrize(
    ("views", "num_blocks", "kind", "text"),
    [
        ([torch.zeros(2, 2)], 1, TypeError, "views"),
        ({"a": [torch.zeros(2, 2)]}, 1, TypeError, "'a'"),
        ({"a": torch.zeros(())}, 1, ValueError, "'a'"),
        (views_of(8), 0, ValueError, "num_blocks must be at least 1, got 0"),
        (views_of(8), 1.5, TypeError, "num_blocks"),
        (views_of(8), True, TypeError, "num_blocks"),
    ],
)
def test_bad_mirror(views: Any, num_blocks: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        host_mirror(views, num_blocks)


def test_more_than_the_host_has_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = pinned_bytes()
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: 10 * MIB)
    with pytest.raises(MemoryError) as error:
        host_mirror(views_of(MIB, MIB), 6)
    text = str(error.value)
    assert "asked for 12582912 bytes (12.0 MiB)" in text
    assert re.search(r"host memory free: 10485760 bytes .*, enough for 5 blocks", text)
    assert "lower num_blocks (6 blocks of 2097152 bytes in 2 views)" in text
    with pytest.raises(MemoryError, match="lower the shape"):
        empty_pinned((11, MIB))
    assert pinned_bytes() == before
    host_mirror(views_of(MIB, MIB), 5)


def test_free_memory_is_read_from_the_system() -> None:
    free = pinned_memory._free_bytes()
    assert free is not None
    assert 0 < free < 1 << 50


# ------------------------------------------------------------------------ on the simulated NPU


def place_of(tensor: torch.Tensor) -> int:
    """What the runtime says about a tensor's memory: 0 is page-locked, 2 is not."""
    library = ctypes.CDLL("libascendcl.so")
    attributes = (ctypes.c_uint32 * 7)()
    pointer = ctypes.c_void_p(tensor.data_ptr())
    assert library.aclrtPointerGetAttributes(pointer, attributes) == 0
    return attributes[1]


def test_exact_size_and_freed_with_the_last_tensor(sim: ModuleType, npu: torch.device) -> None:
    before = live(sim)
    tensor = empty_pinned((5, MIB + 1), torch.int8)
    assert live(sim) == (before[0] + 5 * (MIB + 1), before[1] + 1, before[2])
    assert pinned_bytes() >= 5 * (MIB + 1)
    assert place_of(tensor) == 0
    part = tensor[3].view(torch.uint8)[7:]
    del tensor
    gc.collect()
    assert place_of(part) == 0
    part.fill_(3)
    assert live(sim)[1] == before[1] + 1
    del part
    assert live(sim) == before


def test_copies_really_move_between_npu_and_pinned_memory(
    sim: ModuleType, npu: torch.device
) -> None:
    host = empty_pinned((4, 4096), torch.int8)
    host.copy_(torch.arange(4 * 4096).view(4, 4096) % 127)
    device = host.to(npu, non_blocking=True)
    back = empty_pinned((4, 4096), torch.int8)
    back.copy_(device, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, host)


def test_pieces_where_one_call_cannot_pin_so_much(sim: ModuleType, npu: torch.device) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    before = live(sim)
    payload = 96 * 1024
    tensor = empty_pinned((64, payload), torch.int8)
    assert tensor.shape == (64, payload)
    # Neighbouring blocks do not touch, so that no copy is merged over the end of a piece.
    assert payload < tensor.stride(0) <= payload + 1024
    now = live(sim)
    assert now[0] - before[0] == 64 * tensor.stride(0)
    assert now[1] == before[1]
    assert now[2] - before[2] >= 6
    assert all(place_of(tensor[block]) == 0 for block in range(64))

    pattern = torch.arange(64, dtype=torch.int8)[:, None].expand(64, payload).contiguous()
    device = pattern.to(npu)
    for block in range(64):  # whole blocks: each must lie in one piece
        tensor[block].copy_(device[block], non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(tensor, pattern)
    del tensor
    assert live(sim) == before


@pytest.mark.parametrize(
    ("payload", "limit"),
    [(100, 100_000), (4096, 100_000), (5000, 200_000), (65536, 400_000), (300_000, 700_000)],
)
def test_no_block_lies_in_two_pieces(
    sim: ModuleType, npu: torch.device, payload: int, limit: int
) -> None:
    sim.configure(pinned_bytes_per_call=limit)
    before = live(sim)
    rows = 3 * limit // payload + 1
    tensor = empty_pinned((rows, payload))
    device = torch.zeros(payload, dtype=torch.int8).to(npu)
    tensor.fill_(1)
    for block in range(rows):
        tensor[block].copy_(device, non_blocking=True)
    torch.npu.synchronize()
    assert not bool(tensor.any())
    del tensor
    assert live(sim) == before


def test_swapping_neighbouring_blocks_of_a_mirror_in_pieces(
    sim: ModuleType, npu: torch.device
) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    before = live(sim)
    cache = torch.zeros(40, 64 * 1024, dtype=torch.int8).to(npu)
    views = block_views({"a": cache}, 40)
    mirror = host_mirror(views, 40)
    mirror["a"].copy_(torch.arange(40, dtype=torch.int8)[:, None].expand(40, 64 * 1024))
    ids = torch.arange(40)
    wanted = mirror["a"].clone()
    swap_blocks_batch(list(mirror.values()), list(views.values()), ids, ids)
    del mirror  # the copies may still run: the operator keeps it
    back = host_mirror(views, 40)
    swap_blocks_batch(list(views.values()), list(back.values()), ids, ids)
    torch.npu.synchronize()
    assert torch.equal(back["a"], wanted)
    del back

    def released() -> bool:
        raise_pending_errors()
        return live(sim) == before

    assert eventually(released), (live(sim), before)


def test_a_block_that_no_call_can_pin(sim: ModuleType, npu: torch.device) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    before = live(sim)
    for shape in [(1, 2 * MIB), (4, 2 * MIB)]:
        with pytest.raises(MemoryError, match=r"1048576 bytes \(1.0 MiB\) in one call"):
            empty_pinned(shape)
    assert live(sim) == before


def test_runtime_without_registration(
    sim: ModuleType, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    before = live(sim)
    monkeypatch.setattr(pinned_memory._runtime_library(), "has_register", False)
    with pytest.raises(MemoryError, match="no aclrtHostRegisterV2"):
        empty_pinned((64, 65536))
    assert live(sim) == before


def test_exhausted_pinned_memory_frees_everything(sim: ModuleType, npu: torch.device) -> None:
    before = live(sim)
    sim.configure(pinned_memory_bytes=before[0] + 5 * MIB)
    with pytest.raises(MemoryError) as error:
        host_mirror(views_of(65536, 65536, 65536), 32)
    text = str(error.value)
    assert "host_mirror asked for 6291456 bytes (6.0 MiB)" in text
    assert "stopped at view 3 of 3: view 'v2': cannot page-lock 2097152 bytes" in text
    assert "207001" in text
    assert "the simulated runtime pins 1048576 bytes (1.0 MiB) more" in text
    assert "lower num_blocks (32 blocks of 196608 bytes in 3 views)" in text
    # The error still holds its frames; nothing may hang on them.
    assert live(sim) == before
    del error
    assert len(host_mirror(views_of(65536, 65536), 32)) == 2


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failing_allocation_frees_the_ones_before(
    sim: ModuleType, npu: torch.device, nth: int
) -> None:
    before = live(sim)
    sim.fail_call("aclrtMallocHost", nth=nth, code=507899)
    with pytest.raises(RuntimeError, match=rf"view 'v{nth - 1}': .*507899"):
        host_mirror(views_of(1000, 1000, 1000), 4)
    assert live(sim) == before
    sim.clear_faults()
    mirror = host_mirror(views_of(1000, 1000, 1000), 4)
    assert live(sim)[0] - before[0] == 12000
    del mirror
    assert live(sim) == before


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_failing_registration_frees_the_pieces_before(
    sim: ModuleType, npu: torch.device, nth: int
) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    before = live(sim)
    # The first calls find the size of a piece; then some succeed and one fails.
    sim.fail_call("aclrtHostRegisterV2", nth=nth, code=507899)
    with pytest.raises(MemoryError, match="507899"):
        host_mirror(views_of(65536, 65536), 64)
    assert live(sim) == before


def test_small_allocation_is_never_tried_in_pieces(sim: ModuleType, npu: torch.device) -> None:
    before = live(sim)
    sim.reset_stats()
    sim.fail_call("aclrtMallocHost", nth=2, code=207001)
    with pytest.raises(MemoryError, match="207001"):
        host_mirror(views_of(4096, 4096), 8)
    assert sim.stats().calls.get("aclrtHostRegisterV2", 0) == 0
    assert live(sim) == before


def test_memory_that_cannot_be_unregistered_stays_mapped(
    sim: ModuleType, npu: torch.device
) -> None:
    sim.configure(pinned_bytes_per_call=MIB)
    tensor = empty_pinned((64, 65536))
    address, stuck = tensor.data_ptr(), len(pinned_memory._stuck)
    sim.fail_call("aclrtHostUnregister", nth=1, code=507899)
    with pytest.warns(RuntimeWarning, match="aclrtHostUnregister failed"):
        del tensor
    assert len(pinned_memory._stuck) == stuck + 1
    assert ctypes.c_uint8.from_address(address).value >= 0  # still mapped


def test_pinning_works_on_a_thread_without_a_device(sim: ModuleType, npu: torch.device) -> None:
    import threading

    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(empty_pinned((4, 4096))))
    thread.start()
    thread.join()
    assert place_of(made[0]) == 0


def test_view_over_npu_memory_shares_it_and_runs_nothing(
    sim: ModuleType, npu: torch.device
) -> None:
    cache = torch.empty(8, 16, 4, dtype=torch.float16, device=npu)
    sim.reset_stats()
    views = block_views({"a": (cache, cache[:, :8])}, 8)
    assert sim.stats().operators == {}
    assert sum(sim.stats().copies.values()) == 0
    view = views["a"]
    assert view.device == cache.device
    assert view.data_ptr() == cache.data_ptr()
    assert view.shape == (8, 128)
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_tiled_npu_format_is_refused(
    sim: ModuleType, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_npu

    cache = torch.empty(8, 16, 32, dtype=torch.float16, device=npu)
    monkeypatch.setattr(torch_npu, "get_npu_format", lambda tensor: 29)
    with pytest.raises(ValueError, match=r"layer 'a', component 0: shape \(8, .*format 29"):
        block_views({"a": cache}, 8)


SCRIPT = """
import os
from npu_kv_ops import empty_pinned, host_mirror
keep = empty_pinned((4, 4096))
child_drops = [empty_pinned((4, 4096)).fill_(7)]
pid = os.fork()
if pid == 0:
    child_drops.clear()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert bool((child_drops[0] == 7).all())
device = keep.to(DEVICE, non_blocking=True)
mirror = host_mirror({"a": device}, 3)
mirror["a"].copy_(device[:3], non_blocking=True)
print("end")
"""


def test_memory_alive_at_a_fork_and_at_the_end_of_the_process(run_script: Any) -> None:
    used = runtime.current()
    device = "cpu" if used == "host" else "npu"
    result = run_script(f"DEVICE = {device!r}\n{SCRIPT}", runtime=used)
    assert result.stdout.strip() == "end"
    notice = "npu_kv_ops: using the simulated NPU"
    assert [x for x in result.stderr.splitlines() if x.strip() and not x.startswith(notice)] == []

"""Page-locked host memory of exactly the size asked for.

torch_npu's own pinned allocator rounds every size up to a power of two, which can double a host
pool. The memory here comes straight from the runtime: from ``aclrtMallocHost``, or, where one call
cannot pin so much, from one address range that is page-locked piece by piece with
``aclrtHostRegisterV2``. Import it from :mod:`npu_kv_ops.kv_cache`.

Importing this module loads torch and the libraries of the package; see :mod:`npu_kv_ops.runtime`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_kv_ops import runtime

runtime.load()

import torch  # noqa: E402

__all__ = ["empty_pinned", "free_host_bytes", "host_mirror", "pinned_bytes"]

_MEMORY_ALLOCATION = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION: also what too large a call answers
_REGISTER_PINNED = 0x10000000  # ACL_HOST_REG_PINNED
# No runtime limits a call to less; so a failure of a smaller call means that memory is short.
_MIN_PIECE_BYTES = 64 << 10
_LINE_BYTES = 64


def empty_pinned(shape: int | Sequence[int], dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Returns an uninitialised CPU tensor in page-locked memory of exactly its size.

    Args:
        shape: as for :func:`torch.empty`. Dimension 0 counts blocks; a block is never divided
            between two pieces.
        dtype: any dtype.

    Returns:
        A tensor that owns its memory: it is freed when the last tensor on the same storage is
        gone. Contiguous, except where the runtime could not pin all of it in one call. Then
        ``stride(0)`` is a little larger than a block (of 64 bytes or more), so that no copy of
        neighbouring blocks is ever merged into one that spans two pieces, which the runtime would
        refuse. On a machine without an NPU runtime: ordinary memory, equal in every other respect.

    Raises:
        TypeError, ValueError: a shape or dtype that is none.
        MemoryError: the memory is not there or cannot be page-locked; says how much was asked for
            and how much is free.
        RuntimeError: the runtime failed otherwise.

    The memory is the runtime's, not torch_npu's: no stream records its use. Operators of this
    package keep it alive until their copies are done (and let go of it the next time the package
    is used). For other asynchronous copies, and for captured graphs, which hold its address, keep
    the tensor yourself until they are done, for instance by ``torch.npu.synchronize()``.
    ``is_pinned()`` may say False on older stacks, which know only torch_npu's own blocks; copies
    by this package are asynchronous all the same. A forked child must not use it. Thread-safe.
    """
    sizes = _check_shape(shape)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    plan = _Plan("empty_pinned", sizes, dtype)
    _require_free([plan], "lower the shape")
    if runtime.load() == "host":
        return _tensor(plan, None, plan.row_bytes)
    with _Pins() as pins:
        try:
            pins.add(plan)
        except MemoryError as error:
            raise MemoryError(f"{error}; lower the shape") from None
        return pins.tensors()[0]


def host_mirror(views: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """Makes the host pool for block views: the same names and payloads, other memory.

    Args:
        views: view name -> tensor whose dimension 0 counts blocks, as
            :func:`npu_kv_ops.block_views` returns them. Any device; data is not read.
        num_blocks: blocks of the host pool, at least 1; free of the number of device blocks.

    Returns:
        The same names in the same order -> CPU tensor ``[num_blocks, *view.shape[1:]]`` of the
        view's dtype, made by :func:`empty_pinned`: uninitialised, page-locked, each an allocation
        of its own.

    Raises:
        TypeError, ValueError: arguments of another kind.
        MemoryError: the pool does not fit; says how much was asked for, how much is free and how
            many blocks would fit. Nothing stays allocated.
        RuntimeError: the runtime failed otherwise. Nothing stays allocated.

    Thread-safe.
    """
    if not isinstance(views, Mapping):
        raise TypeError(f"views must map names to tensors, got {type(views).__name__}")
    if not isinstance(num_blocks, int) or isinstance(num_blocks, bool):
        raise TypeError(f"num_blocks must be an int, got {type(num_blocks).__name__}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    plans = []
    for name, view in views.items():
        if not isinstance(view, torch.Tensor):
            raise TypeError(f"views[{name!r}] must be a tensor, got {type(view).__name__}")
        if view.dim() == 0:
            raise ValueError(f"views[{name!r}] has no dimensions, so no blocks")
        plans.append(_Plan(f"view {name!r}", (num_blocks, *view.shape[1:]), view.dtype))

    block_bytes = sum(plan.row_bytes for plan in plans)
    advice = f"lower num_blocks ({num_blocks} blocks of {block_bytes} bytes in {len(plans)} views)"
    _require_free(plans, advice)
    if runtime.load() == "host":
        return {n: _tensor(p, None, p.row_bytes) for n, p in zip(views, plans, strict=True)}
    total = sum(plan.bytes for plan in plans)
    with _Pins() as pins:
        for done, plan in enumerate(plans):
            try:
                pins.add(plan)
            except MemoryError as error:
                raise MemoryError(
                    f"host_mirror asked for {_text(total)} of page-locked memory and stopped at "
                    f"view {done + 1} of {len(plans)}: {error}; {advice}"
                ) from None
        return dict(zip(views, pins.tensors(), strict=True))


def free_host_bytes() -> int | None:
    """Bytes of host memory that can still be had, also by the control group; None if unknown."""
    return _free_bytes()


def pinned_bytes() -> int:
    """Bytes this module holds page-locked now. Thread-safe."""
    with _live_lock:
        return sum(_live.values())


# ------------------------------------------------------------------------------ what to allocate


class _Plan:
    """One tensor to allocate; rows are the slices of dimension 0."""

    def __init__(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.what = what
        self.shape = tuple(shape)
        self.dtype = dtype
        self.rows = self.shape[0] if self.shape else 1
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        self.bytes = self.rows * self.row_bytes

    def piecewise_row_strides(self) -> list[int]:
        """Row strides under which a range may be divided, the tightest first."""
        if self.row_bytes < _LINE_BYTES:
            return [self.row_bytes]
        # A piece is a whole number of rows and of pages: rounder strides allow finer pieces.
        units = [unit for unit in (64, 128, 256, 512, 1024, 2048) if unit < _PAGE]
        strides = [_round_up(self.row_bytes + 1, unit) for unit in (*units, _PAGE)]
        return list(dict.fromkeys(strides))


class _Pins:
    """Allocations that are all freed when leaving, unless they have become tensors."""

    def __init__(self) -> None:
        self._acl = _runtime_library()
        self._made: list[tuple[_Plan, _Range | None, int]] = []

    def __enter__(self) -> _Pins:
        return self

    def __exit__(self, *_: object) -> None:
        for _plan, memory, _stride in self._made:
            if memory is not None:
                memory.free()

    def add(self, plan: _Plan) -> None:
        if plan.bytes == 0:
            self._made.append((plan, None, plan.row_bytes))
            return
        address, code = self._acl.malloc_host(plan.bytes)
        if code == 0:
            memory = _Range(self._acl, address, plan.bytes)
            self._made.append((plan, memory, plan.row_bytes))
            return
        reason = self._acl.failure("aclrtMallocHost", code)
        if code != _MEMORY_ALLOCATION:
            raise RuntimeError(f"{plan.what}: cannot page-lock {_text(plan.bytes)}: {reason}")
        if plan.rows > 1 and plan.bytes > _MIN_PIECE_BYTES:
            for stride in plan.piecewise_row_strides():
                try:
                    memory = _pin_in_pieces(self._acl, plan.rows, stride)
                except _CannotPinError as error:
                    last = error
                    if error.final:
                        break
                else:
                    self._made.append((plan, memory, stride))
                    return
            reason = f"{reason}; in pieces of whole blocks: {last}"
        raise MemoryError(
            f"{plan.what}: cannot page-lock {_text(plan.bytes)}: {reason}. Page-locked by this "
            f"package: {_text(pinned_bytes())}; {_free_text()}"
        )

    def tensors(self) -> list[torch.Tensor]:
        tensors = []
        while self._made:
            tensors.append(_tensor(*self._made[0]))
            del self._made[0]
        return tensors


def _tensor(plan: _Plan, memory: _Range | None, row_stride: int) -> torch.Tensor:
    """Over ``memory``, or over ordinary memory of its own."""
    strides = [1] * len(plan.shape)
    for dim in range(len(plan.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * plan.shape[dim + 1]
    if strides:
        strides[0] = row_stride // plan.dtype.itemsize
    # A tensor of its own on the buffer's storage: no view, nothing for autograd, and writable in
    # and out of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        if memory is None:
            return torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        storage = torch.frombuffer(memory.hand_over(), dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=plan.dtype, device="cpu")
        return empty.set_(storage, 0, plan.shape, strides)


# ------------------------------------------------------------------------------------- memory

_PAGE = mmap.PAGESIZE
_live_lock = threading.RLock()  # re-entrant: a finalizer may run while its thread holds it
_live: dict[int, int] = {}  # address -> bytes
_stuck: list[mmap.mmap] = []  # ranges the runtime would not unregister: never unmapped


class _Range:
    """Page-locked memory at ``address``; freed once, by :meth:`free` or with its buffer."""

    def __init__(
        self,
        acl: _Acl,
        address: int,
        size: int,
        mapping: mmap.mmap | None = None,
        pieces: Sequence[int] = (),
    ) -> None:
        self.address = address
        self.size = size
        self._acl = acl
        self._mapping = mapping
        self._pieces = pieces
        self._pid = os.getpid()
        with _live_lock:
            _live[address] = size

    def hand_over(self) -> ctypes.Array[ctypes.c_uint8]:
        """The memory as a buffer that frees it when it dies."""
        array_type = ctypes.c_uint8 * self.size
        if self._mapping is None:
            buffer = array_type.from_address(self.address)
        else:
            buffer = array_type.from_buffer(self._mapping)
        # Not at interpreter exit: other threads and the device may still use the memory then, and
        # the process gives it back anyway.
        weakref.finalize(buffer, self.free).atexit = False
        return buffer

    def free(self) -> None:
        with _live_lock:
            known = _live.pop(self.address, None)
        # In a forked child the memory belongs to the parent.
        if known is None or os.getpid() != self._pid:
            return
        if self._mapping is None:
            self._warn("aclrtFreeHost", self._acl.free_host(self.address))
        elif not _unregister(self._acl, self._pieces):
            _stuck.append(self._mapping)
            self._warn("aclrtHostUnregister", -1)
        self._mapping = None

    def _warn(self, function: str, code: int) -> None:
        if code != 0:
            warnings.warn(
                f"{function} failed for {self.size} page-locked bytes at {self.address:#x}; "
                "they stay allocated",
                RuntimeWarning,
                stacklevel=3,
            )


class _CannotPinError(Exception):
    """Final when finer pieces would not help either."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


def _pin_in_pieces(acl: _Acl, rows: int, row_stride: int) -> _Range:
    """One range of ``rows`` rows, page-locked in pieces of whole rows."""
    if not acl.has_register:
        raise _CannotPinError("this runtime has no aclrtHostRegisterV2 to do that", final=True)
    size = rows * row_stride
    # Pieces begin at pages, and no row lies in two of them.
    unit = row_stride * (_PAGE // math.gcd(row_stride, _PAGE))
    piece = size // 2 // unit * unit
    if piece == 0:
        reason = f"the smallest piece would be {unit} bytes of {size}"
        raise _CannotPinError(reason, final=False)
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _CannotPinError(f"no address range of {size} bytes: {error}", final=True) from None
    # A copy-on-write page would part from the one the device writes to.
    mapping.madvise(mmap.MADV_DONTFORK)
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))

    done: list[int] = []
    offset = 0
    while offset < size:
        length = min(piece, size - offset)
        code = acl.register(address + offset, length)
        if code == 0:
            done.append(address + offset)
            offset += length
            continue
        reason = acl.failure("aclrtHostRegisterV2", code)
        smaller = piece // 2 // unit * unit
        # Once a piece of this size went through, a failure is not about the size of a call.
        final = bool(done) or code != _MEMORY_ALLOCATION
        # Halving lands between a limit and half of it, so half the least limit is still tried.
        if final or smaller < max(unit, _MIN_PIECE_BYTES // 2):
            if not _unregister(acl, done):
                _stuck.append(mapping)
            reason = f"{reason} (after {offset} bytes in pieces of {piece})"
            raise _CannotPinError(reason, final=final)
        piece = smaller
    return _Range(acl, address, size, mapping, done)


def _unregister(acl: _Acl, pieces: Sequence[int]) -> bool:
    # Every one is tried, whatever became of those before it.
    codes = [acl.unregister(address) for address in pieces]
    return not any(codes)


# ------------------------------------------------------------------------------ the ACL runtime


class _Acl:
    """The five functions of the runtime that are needed here. Thread-safe."""

    def __init__(self) -> None:
        # torch_npu has loaded it, from CANN or the simulator; the name finds that one.
        library = ctypes.CDLL("libascendcl.so")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._malloc = self._function(library, "aclrtMallocHost", ctypes.POINTER(pointer), size)
        self._free = self._function(library, "aclrtFreeHost", pointer)
        self._message = library.aclGetRecentErrMsg
        self._message.argtypes, self._message.restype = [], ctypes.c_char_p
        self.has_register = hasattr(library, "aclrtHostRegisterV2") and hasattr(
            library, "aclrtHostUnregister"
        )
        if self.has_register:
            self._register = self._function(
                library, "aclrtHostRegisterV2", pointer, ctypes.c_uint64, ctypes.c_uint32
            )
            self._unregister = self._function(library, "aclrtHostUnregister", pointer)

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Any:
        function = getattr(library, name)
        function.argtypes, function.restype = list(arguments), ctypes.c_int
        return function

    def malloc_host(self, size: int) -> tuple[int, int]:
        """Address and return code."""
        pointer = ctypes.c_void_p()
        code = self._malloc(ctypes.byref(pointer), size)
        return pointer.value or 0, code

    def free_host(self, address: int) -> int:
        return int(self._free(address))

    def register(self, address: int, size: int) -> int:
        return int(self._register(address, size, _REGISTER_PINNED))

    def unregister(self, address: int) -> int:
        return int(self._unregister(address))

    def failure(self, function: str, code: int) -> str:
        """Text for a failed call; to be asked for by the thread that made it."""
        text = self._message()
        detail = f": {text.decode(errors='replace').strip()}" if text else ""
        return f"{function} failed with code {code}{detail}"


_acl: _Acl | None = None


def _runtime_library() -> _Acl:
    """The runtime, with a device context on the calling thread, which pinning needs."""
    global _acl
    npu = sys.modules["torch_npu"].npu
    npu.set_device(npu.current_device())
    if _acl is None:
        _acl = _Acl()
    return _acl


# ----------------------------------------------------------------------------------- how much


def _require_free(plans: Sequence[_Plan], advice: str) -> None:
    """Refuses early what would drive the host out of memory half way."""
    asked = sum(plan.bytes for plan in plans)
    free = _free_bytes()
    if free is None or asked <= free:
        return
    row_bytes = sum(plan.row_bytes for plan in plans)
    raise MemoryError(
        f"asked for {_text(asked)} of host memory; {_free_text()}, enough for "
        f"{free // row_bytes} blocks; {advice}"
    )


def _free_bytes() -> int | None:
    """Host memory that can still be had, within the control group too; None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            # Page cache of the group is given back on demand.
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith("inactive_file "):
                    used -= int(line.split()[1])
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def _free_text() -> str:
    free = _free_bytes()
    text = "host memory free: " + ("unknown" if free is None else _text(free))
    if runtime.current() == "sim":
        from npu_kv_ops import simulator

        settings = simulator.settings()
        left = settings["pinned_memory_bytes"] - simulator.stats().live["pinned_bytes"]
        text += (
            f"; the simulated runtime pins {_text(left)} more, "
            f"{_text(settings['pinned_bytes_per_call'])} in one call"
        )
    return text


def _text(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size} bytes ({size / unit:.1f} {name})"
    return f"{size} bytes"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _check_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else shape
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(f"shape must be an int or a sequence of ints, got {type(shape).__name__}")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"shape must hold ints, got {size!r} in {tuple(sizes)}")
        if size < 0:
            raise ValueError(f"shape must not hold negative sizes, got {tuple(sizes)}")
    return tuple(sizes)

"""The operator's Python face: ``torch.ops.npu_kv.swap_blocks_batch``, its counters and its errors.

Importing this module loads torch and the libraries of the package; see :mod:`npu_kv_ops.runtime`.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from npu_kv_ops import runtime
from npu_kv_ops.errors import TransferError

runtime.load()

import torch  # noqa: E402
from torch.fx.node import has_side_effect  # noqa: E402

from npu_kv_ops import _C, fake_kernels  # noqa: E402, F401

__all__ = [
    "DeferredCallStats",
    "OpStats",
    "TransferError",
    "deferred_call_stats",
    "live_graphs",
    "max_batch",
    "pointers_in_graphs",
    "raise_pending_errors",
    "release_graphs",
    "reset_stats",
    "set_max_batch",
    "shutdown",
    "stats",
    "swap_blocks_batch",
]

_SECONDS_TO_STOP = 0.5
_overloads = torch.ops.npu_kv.swap_blocks_batch

# `.ptrs` trusts its addresses, because asking about each costs more than the copy's launch. The
# simulated runtime is there to find mistakes, so there every address is asked about.
_C.set_check_all_pointers(
    os.environ.get("NPU_KV_CHECK_POINTERS", "1" if runtime.current() == "sim" else "0") == "1"
)

# It mutates nothing that its schema could declare, so every compiler would delete the call.
has_side_effect(_overloads.ptrs)


class DeferredCallStats(NamedTuple):
    """Of the calls with ids on one NPU, since the start of the process.

    ``calls`` counts those whose ids were read, one for every replay, ``failures`` those of them
    that went wrong. ``p50_start_ns`` and ``p99_start_ns``: from the time the stream calls the host
    to the first copy handed to the runtime.
    """

    calls: int
    failures: int
    p50_start_ns: int
    p99_start_ns: int


class OpStats(NamedTuple):
    """Process-wide counters of the operator since the start or the last :func:`reset_stats`.

    ``calls`` counts the calls that had something to copy, ``bytes`` the payload bytes,
    ``copies_before`` the copies before neighbouring blocks were merged (pairs of ids times tensors)
    and ``copies_after`` the copies handed to the runtime. A call is counted when it is accepted,
    one with ids on an NPU whenever its ids are read: at every replay of a graph. Copies that a
    graph records itself count once, at capture.
    """

    calls: int
    bytes: int
    copies_before: int
    copies_after: int


def swap_blocks_batch(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_blocks: torch.Tensor | Sequence[int],
    dst_blocks: torch.Tensor | Sequence[int],
) -> None:
    """Copy ``src[t][src_blocks[i]]`` to ``dst[t][dst_blocks[i]]`` for every tensor t and pair i.

    Ordered as if the copy ran on the current stream of the tensors' NPU. The same as
    ``torch.ops.npu_kv.swap_blocks_batch`` (ids as tensors) and
    ``torch.ops.npu_kv.swap_blocks_batch.static`` (ids as lists of int).

    Args:
        src: tensors ``[num_blocks, ...]`` of any dtype, all on the CPU or all on one NPU.
            Dimension 0 is the block. The payload of a block, which is all other dimensions, must
            be contiguous; ``stride(0)`` may be larger than the payload, and only the payload is
            copied.
        dst: as many tensors, written in place, all on the CPU or all on one NPU. ``dst[t]`` has
            the dtype and the payload bytes of ``src[t]``; the number of blocks and ``stride(0)``
            may differ. The two lists decide the direction; two different NPUs are refused.
        src_blocks: the blocks to read; 1-D int32 or int64 tensor, or a list of int.
        dst_blocks: the blocks to write, as many, of the same kind and on the same device. A
            negative id in either list skips the pair.

    Where ids are decides when they are read:

    - On the NPU of the pools: when the stream gets there, in eager code and at every replay of a
      graph. The host does not wait for them; what is wrong with them is raised later, see below.
    - On the CPU: at the call. A stream that captures a graph refuses them, because the graph would
      copy the blocks of the capture for ever.
    - In a list: at the call. In a graph they are constants by intention.

    The schema marks ``src`` as written, which it is not: compilers of graphs copy inputs that are
    only read into memory of their own.

    The copies of a call are unordered. So a destination block that is named twice, or a block that
    is both read and written, is an error, also when two tensors share memory.

    Copies between an NPU and page-locked memory, and on an NPU, are asynchronous. With page-able
    host memory the call returns when the copy is done, and warns once. Page-locked memory must
    stay unchanged until the stream has passed the copy. The operator keeps all tensors of a call
    alive until then, those of a captured call as long as the graph (see :func:`release_graphs`).
    A graph must not be replayed on two streams at once.

    Raises:
        IndexError: an id is beyond its pool or beyond 64 bits; names the list, the position, the id
            and the limit.
        ValueError: lists of different length, differing payloads, a payload that is not
            contiguous, tensors of one list on different devices, destinations that overlap each
            other or a source, freed storage.
        TypeError: an argument of another kind, or one tensor and one list of ids; an id dtype
            other than int32 and int64; ``src[t]`` and ``dst[t]`` differ in dtype.
        TransferError: the runtime refused a copy, of this call or of an earlier one on this NPU; an
            earlier call had ids on the NPU that are beyond their pool or named twice; the runtime
            lacks what ids on the NPU need.
        RuntimeError: under capture: CPU ids, page-able memory, or more copies from lists of ids
            than a graph can hold.

    Nothing is copied when one of these is raised, except for ``TransferError``. Ids on an NPU that
    are wrong copy nothing either. Safe from several threads.
    """
    try:
        if isinstance(src_blocks, torch.Tensor) or isinstance(dst_blocks, torch.Tensor):
            _overloads.default(src, dst, src_blocks, dst_blocks)
        else:
            _overloads.static(src, dst, src_blocks, dst_blocks)
    except RuntimeError:
        # torch answers so to what does not fit the schema, at length and without the position.
        mistake = mistake_in(src, dst, src_blocks, dst_blocks)
        if mistake is None:
            raise
        raise mistake from None


def mistake_in(
    src: object, dst: object, src_blocks: object, dst_blocks: object
) -> TypeError | IndexError | None:
    """What Python's own kinds of error say about arguments that do not fit the schema, or None."""
    for name, tensors in (("src", src), ("dst", dst)):
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            return TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                return TypeError(f"{name}[{position}] must be a tensor, got {kind}")
    lists = (("src_blocks", src_blocks), ("dst_blocks", dst_blocks))
    for name, ids in lists:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            kind = type(ids).__name__
            return TypeError(f"{name} must be a 1-D tensor or a list of int, got {kind}")
    if isinstance(src_blocks, torch.Tensor) != isinstance(dst_blocks, torch.Tensor):
        kinds = " and ".join(f"{name} is a {type(ids).__name__}" for name, ids in lists)
        return TypeError(f"{kinds}: pass both as tensors or both as lists of int")
    for name, ids in lists:
        if isinstance(ids, torch.Tensor) or not isinstance(ids, Iterable):
            continue
        for position, block in enumerate(ids):
            try:
                number = operator.index(block)
            except TypeError:
                return TypeError(f"{name}[{position}] is {block!r}; block ids are int")
            if not -(2**63) <= number < 2**63:
                return IndexError(f"{name}[{position}] is {number}, which exceeds 64 bits")
    return None


def raise_pending_errors() -> None:
    """Raise what went wrong on any NPU after the call it belongs to had returned.

    Also lets go of host memory whose copies are done. Does not wait: synchronize the stream first
    to be sure that all earlier calls were issued. Safe from several threads; each error is raised
    once.

    Raises:
        TransferError: with the messages of all such errors.
    """
    message = _C.take_pending_errors(-1)
    if message:
        raise TransferError(message)


@contextlib.contextmanager
def pointers_in_graphs() -> Iterator[None]:
    """Let ``.ptrs`` be captured by the calling thread: every replay copies the same addresses.

    The memory must outlive the graph; the operator cannot keep alive what it has only addresses
    of.
    """
    before = _C.pointers_in_graphs()
    _C.set_pointers_in_graphs(True)
    try:
        yield
    finally:
        _C.set_pointers_in_graphs(before)


def live_graphs() -> int:
    """Return how many captured graphs the operator holds tensors or page-locked memory for."""
    return _C.live_graphs()


def release_graphs(device: int = -1) -> int:
    """Let go of what belongs to captured graphs: tensors, page-locked memory, signals.

    That happens by itself when a graph is destroyed, if the runtime tells
    (``aclmdlRIDestroyRegisterCallback``). This is for runtimes that do not.

    Args:
        device: index of an NPU; negative: all. None of its graphs with calls of the operator may
            be running, or be replayed again, or be captured meanwhile: synchronize first.

    Returns:
        how many graphs there were. Safe from several threads.
    """
    return _C.release_graphs(device)


def deferred_call_stats(device: int) -> DeferredCallStats:
    """Return the counters of the calls with ids on the NPU ``device``. Safe from several threads.

    All zeros when there were none.
    """
    return DeferredCallStats(*_C.deferred_call_stats(device))


def shutdown() -> None:
    """Stop serving calls with ids on an NPU, as it happens at the end of the process.

    Later calls raise ``TransferError``. A graph that is replayed goes on without its copies, which
    is a pending error of its NPU. Waits half a second at most for the call that is being served.
    Safe from several threads; there is no way back.
    """
    _C.stop_deferred_calls(_SECONDS_TO_STOP)


_PID = os.getpid()


@atexit.register
def _end() -> None:
    if os.getpid() != _PID:
        return  # a forked child has neither the threads nor the runtime
    # The runtime and the interpreter are gone soon after.
    shutdown()
    _C.end_graphs(_SECONDS_TO_STOP)


def stats() -> OpStats:
    """Return the counters of the operator. Safe from several threads."""
    return OpStats(*_C.stats())


def reset_stats() -> None:
    """Set all counters of :func:`stats` to zero."""
    _C.reset_stats()


def max_batch() -> int:
    """Return how many copies one runtime call takes at most.

    4096 unless the environment variable ``NPU_KV_MAX_BATCH`` or :func:`set_max_batch` says
    otherwise.

    Raises:
        ValueError: ``NPU_KV_MAX_BATCH`` is not a positive integer.
    """
    return _C.max_batch()


def set_max_batch(limit: int) -> None:
    """Set how many copies one runtime call takes at most, for this process, from the next call on.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    _C.set_max_batch(limit)

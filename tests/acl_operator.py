"""Calls of compute operators at the level of the ACL interface, for what torch_npu never sends."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from npu_kv_ops import simulator

FLOAT, INT32, INT64, BFLOAT16 = 0, 3, 9, 27
_DTYPES = {
    torch.float32: FLOAT,
    torch.int32: INT32,
    torch.int64: INT64,
    torch.bfloat16: BFLOAT16,
}
_ND = 2
_HOST = 1


class Tensor(ctypes.Structure):
    """npu_sim_tensor of csrc/simulator/abi/operator_kernel.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("host_constant", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("storage_format", ctypes.c_int32),
        ("storage_dims", ctypes.c_int32),
        ("storage_shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


class Attribute(ctypes.Structure):
    """npu_sim_attribute."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("count", ctypes.c_size_t),
        ("ints", ctypes.POINTER(ctypes.c_int64)),
        ("floats", ctypes.POINTER(ctypes.c_float)),
        ("strings", ctypes.POINTER(ctypes.c_char_p)),
        ("row_lengths", ctypes.POINTER(ctypes.c_size_t)),
    )


class OperatorCall(ctypes.Structure):
    """npu_sim_operator_call."""

    _fields_ = (
        ("type", ctypes.c_char_p),
        ("inputs", ctypes.c_size_t),
        ("input", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.c_size_t),
        ("output", ctypes.POINTER(Tensor)),
        ("attributes", ctypes.c_size_t),
        ("attribute", ctypes.POINTER(Attribute)),
        ("error", ctypes.c_void_p),
        ("error_bytes", ctypes.c_size_t),
    )

    def fail(self, reason: str) -> int:
        text = reason.encode()[: self.error_bytes - 1] + b"\0"
        ctypes.memmove(self.error, text, len(text))
        return 1


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(OperatorCall), ctypes.c_void_p)
_registered: list[Any] = []  # the simulator keeps the pointers for good


def register(
    name: str,
    run: Callable[[OperatorCall], int],
    check: Callable[[OperatorCall], int] | None = None,
) -> None:
    """Make Python functions the kernel of an operator type."""
    functions = [_FUNCTION(lambda call, _: run(call.contents))]
    functions.append(_FUNCTION(lambda call, _: check(call.contents)) if check else _FUNCTION())
    _registered.extend(functions)
    assert simulator.library().npu_sim_register_operator(name.encode(), *functions, None) == 0


class OnDevice:
    """Four float32 numbers, or as many as ``shape`` says, that claim to be on the first device."""

    dtype, device = torch.float32, torch.device("npu:0")

    def __init__(self, address: int, nbytes: int = 16, shape: Sequence[int] = (4,)) -> None:
        self.address, self.nbytes, self.shape = address, nbytes, shape

    def data_ptr(self) -> int:
        return self.address


def pointer_function(name: str) -> Any:
    function = getattr(simulator.library(), name)
    function.restype = ctypes.c_void_p
    return function


def make_description(
    dtype: int, shape: Sequence[int], *, storage: Sequence[int] | None = None, host: bool = False
) -> ctypes.c_void_p:
    runtime = simulator.library()
    extents = (ctypes.c_int64 * len(shape))(*shape)
    description = ctypes.c_void_p(
        pointer_function("aclCreateTensorDesc")(dtype, len(shape), extents, _ND)
    )
    if storage is not None:
        extents = (ctypes.c_int64 * len(storage))(*storage)
        assert runtime.aclSetTensorShape(description, len(storage), extents) == 0
    if host:
        assert runtime.aclSetTensorPlaceMent(description, _HOST) == 0
    return description


@contextlib.contextmanager
def _described(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Descriptors and buffers, destroyed at the end as torch_npu does right after a call."""
    runtime = simulator.library()
    descriptions, buffers = [], []
    for tensor in tensors:
        host = tensor.device.type == "cpu"
        descriptions.append(make_description(_DTYPES[tensor.dtype], tensor.shape, host=host))
        buffers.append(
            ctypes.c_void_p(
                pointer_function("aclCreateDataBuffer")(
                    ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
                )
            )
        )
    try:
        array = ctypes.c_void_p * len(tensors)
        yield array(*[d.value for d in descriptions]), array(*[b.value for b in buffers])
    finally:
        for description in descriptions:
            runtime.aclDestroyTensorDesc(description)
        for buffer in buffers:
            assert runtime.aclDestroyDataBuffer(buffer) == 0


def _set_attributes(attributes: ctypes.c_void_p, values: Mapping[str, Any]) -> None:
    runtime = simulator.library()
    for name, value in values.items():
        key = name.encode()
        if isinstance(value, bool):
            code = runtime.aclopSetAttrBool(attributes, key, ctypes.c_uint8(value))
        elif isinstance(value, int):
            code = runtime.aclopSetAttrInt(attributes, key, ctypes.c_int64(value))
        elif isinstance(value, float):
            code = runtime.aclopSetAttrFloat(attributes, key, ctypes.c_float(value))
        elif isinstance(value, str):
            code = runtime.aclopSetAttrString(attributes, key, value.encode())
        elif value and isinstance(value[0], list):
            rows = [(ctypes.c_int64 * len(row))(*row) for row in value]
            lengths = (ctypes.c_int * len(rows))(*map(len, rows))
            addresses = (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, rows))
            code = runtime.aclopSetAttrListListInt(attributes, key, len(rows), lengths, addresses)
        else:
            numbers = (ctypes.c_int64 * len(value))(*value)
            code = runtime.aclopSetAttrListInt(attributes, key, len(value), numbers)
        assert code == 0


def execute(
    name: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    attributes: Mapping[str, Any] | None = None,
    *,
    stream: int,
) -> int:
    """Call aclopCompileAndExecute and return its code. CPU tensors are host constants."""
    runtime = simulator.library()
    own = ctypes.c_void_p(pointer_function("aclopCreateAttr")())
    try:
        _set_attributes(own, attributes or {})
        with _described(inputs) as (in_desc, in_data), _described(outputs) as (out_desc, out_data):
            return int(
                runtime.aclopCompileAndExecute(
                    name.encode(),
                    len(inputs),
                    in_desc,
                    in_data,
                    len(outputs),
                    out_desc,
                    out_data,
                    own,
                    0,
                    0,
                    None,
                    ctypes.c_void_p(stream),
                )
            )
    finally:
        runtime.aclopDestroyAttr(own)


def error_message() -> str:
    """aclGetRecentErrMsg of this thread."""
    function = simulator.library().aclGetRecentErrMsg
    function.restype = ctypes.c_char_p
    return (function() or b"").decode()

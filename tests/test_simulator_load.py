"""Loading the simulated runtime: every symbol is there, and activation happens once, in time."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from npu_kv_ops.simulator._activation import FOLDER
from npu_kv_ops.simulator._elf import Symbol, dynamic_symbols, hide_symbols

if TYPE_CHECKING:
    from conftest import RunScript

LIBRARIES = {
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libascend_protobuf.so",
    "libascendcl.so",
    "libfmk_parser.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
}
# Needs libatb.so, an operator library that the simulator does not stand for; torch_npu loads it
# only when one of its operators is called.
OTHER_RUNTIMES = {"libop_plugin_atb.so"}


def symbols(path: Path) -> Iterator[Symbol]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        yield from dynamic_symbols(image)


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_every_symbol_that_torch_npu_needs_is_there(sim: ModuleType, run_script: RunScript) -> None:
    """Fails with the missing names when a new torch_npu needs more than the simulator has."""
    wheel = [file for file in folder("torch_npu").rglob("*.so") if file.name not in OTHER_RUNTIMES]
    assert {"libtorch_npu.so", "_torchair.so"} <= {file.name for file in wheel}
    needed, found = set(), set()
    for file in [*wheel, *(folder("torch") / "lib").glob("lib*.so*")]:
        for symbol in symbols(file):
            if symbol.defined:
                found.add(symbol.name)
            elif file in wheel and not symbol.weak:
                needed.add(symbol.name)
    # What remains comes from the C and C++ libraries, from Python, or from the runtime.
    listed = "\n".join(sorted(needed - found))
    rest = run_script(
        f"""
        import ctypes

        for name in ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        everything = ctypes.CDLL(None)
        for name in {listed!r}.splitlines():
            if not hasattr(everything, name):
                print(name)
        """,
        runtime=None,
    )
    from_runtime = set(rest.stdout.split())
    assert {"aclrtMemcpyAsync", "_ZN2ge10GEFinalizeEv", "strcpy_s"} <= from_runtime
    exported = {
        symbol.name for name in LIBRARIES for symbol in symbols(FOLDER / name) if symbol.defined
    }
    assert from_runtime - exported == set()


def test_functions_that_torch_npu_looks_up_by_name_are_there(sim: ModuleType) -> None:
    """torch_npu finds these with dlsym, on the handle of the library that has them in CANN."""
    for name in (
        "aclrtCreateEventWithFlag",
        "aclrtMallocAlign32",
        "aclrtMemcpyBatchAsync",
        "aclrtLaunchHostFunc",
        "aclrtValueWait",
        "aclmdlRICaptureBegin",
        "aclrtGetStreamResLimit",
    ):
        assert hasattr(ctypes.CDLL("libascendcl.so"), name)
    for name in ("aclSetCompileopt", "aclopCompileAndExecuteV2", "aclrtCtxSetSysParamOpt"):
        assert hasattr(ctypes.CDLL("libacl_op_compiler.so"), name)


def test_activation_imports_no_torch_and_tells_the_user_once(run_script: RunScript) -> None:
    result = run_script(
        """
        import sys
        from npu_kv_ops import simulator

        assert not simulator.is_active()
        simulator.activate(devices=3)
        simulator.activate()
        assert simulator.is_active()
        assert simulator.settings()["devices"] == 3
        simulator.activate(devices=4)
        assert simulator.settings()["devices"] == 4
        assert not any(name.partition(".")[0] in ("torch", "numpy") for name in sys.modules)
        with open("/proc/self/maps") as maps:
            mapped = maps.read()
        assert "libge_runner.so" in mapped
        assert "libtorch" not in mapped
        assert "libc10" not in mapped
        """,
        runtime=None,
    )
    assert result.stderr == "npu_kv_ops: using the simulated NPU (3 devices, on the CPU)\n"


def test_the_notice_can_be_silenced_but_not_the_state(run_script: RunScript) -> None:
    result = run_script(
        """
        import torch
        from npu_kv_ops import simulator

        assert simulator.is_active()
        assert torch.npu.device_count() == 2
        """,
        env={"NPU_KV_SIM_QUIET": "1", "NPU_KV_SIM_DEVICES": "2"},
    )
    assert result.stdout + result.stderr == ""


def test_controls_need_an_active_simulator(run_script: RunScript) -> None:
    run_script(
        """
        from npu_kv_ops import simulator

        for control in (simulator.settings, simulator.stats, simulator.clear_faults):
            try:
                control()
            except RuntimeError as error:
                assert "activate()" in str(error)
            else:
                raise SystemExit(f"{control} did not raise")
        """,
        runtime=None,
    )


def test_activation_after_torch_npu_is_refused(run_script: RunScript) -> None:
    run_script(
        """
        import sys, types
        from npu_kv_ops import simulator

        sys.modules["torch_npu"] = types.ModuleType("torch_npu")
        try:
            simulator.activate()
        except RuntimeError as error:
            assert "torch_npu is imported already" in str(error)
        else:
            raise SystemExit("activated too late")
        assert not simulator.is_active()
        """,
        runtime=None,
    )


def test_activation_beside_a_real_runtime_is_refused(run_script: RunScript, tmp_path: Path) -> None:
    other = tmp_path / "libascendcl.so"
    other.write_bytes((FOLDER / "libascendcl.so").read_bytes())
    run_script(
        f"""
        import ctypes
        from npu_kv_ops import simulator

        ctypes.CDLL({str(other)!r})
        try:
            simulator.activate()
        except RuntimeError as error:
            assert "another libascendcl.so" in str(error)
        else:
            raise SystemExit("activated beside another runtime")
        """,
        runtime=None,
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NPU_KV_SIM_DEVICE", "2", "NPU_KV_SIM_DEVICES"),
        ("NPU_KV_SIM_DEVICES", "two", "whole numbers"),
        ("NPU_KV_SIM_DEVICES", "-1", "devices is -1"),
        ("NPU_KV_SIM_WITHOUT", "aclrtFly", "no function 'aclrtFly'"),
        ("NPU_KV_SIM_WITHOUT", "malloc", "no function 'malloc'"),
    ],
)
def test_wrong_variables_are_errors(
    run_script: RunScript, variable: str, value: str, message: str
) -> None:
    result = run_script(
        """
        import os
        from npu_kv_ops import simulator

        try:
            simulator.activate()
        except ValueError as error:
            print(error)
        assert not simulator.is_active()
        del os.environ[next(name for name in os.environ if name.startswith("NPU_KV_SIM_"))]
        simulator.activate()
        assert simulator.settings()["devices"] == 1
        """,
        runtime=None,
        env={variable: value},
    )
    assert message in result.stdout


def test_a_runtime_without_a_function(run_script: RunScript) -> None:
    """torch_npu and everything else binds to the copy, and what is left out is nowhere."""
    run_script(
        """
        import ctypes
        from npu_kv_ops import simulator

        left_out = ["aclrtMemcpyBatchAsync", "aclrtSynchronizeStreamWithTimeout"]
        simulator.activate(without=left_out)
        try:
            simulator.activate(without=["aclrtFree"])
        except RuntimeError as error:
            assert "new process" in str(error)
        else:
            raise SystemExit("another list was accepted")
        import torch

        for library in ("libascendcl.so", "libacl_op_compiler.so", None):
            for name in left_out:
                assert not hasattr(ctypes.CDLL(library), name), (library, name)
        assert torch.zeros(3, device="npu").cpu().eq(0).all()
        torch.npu.current_stream().synchronize()  # falls back to aclrtSynchronizeStream
        calls = simulator.stats().calls
        assert calls["aclrtSynchronizeStream"] > 0
        assert calls["aclrtSynchronizeStreamWithTimeout"] == 0
        """,
        runtime=None,
    )


def test_hidden_symbols_are_the_only_difference() -> None:
    image = (FOLDER / "libascendcl.so").read_bytes()
    before = {symbol.name for symbol in dynamic_symbols(image)}
    copy = hide_symbols(image, ["aclrtFree", "aclrtMalloc"])
    after = {symbol.name for symbol in dynamic_symbols(copy)}
    assert before - after == {"aclrtFree", "aclrtMalloc"}
    assert sum(a != b for a, b in zip(image, copy)) == 2
    with pytest.raises(ValueError, match="no function 'memcpy'"):
        hide_symbols(image, ["memcpy"])  # needed, not defined
    with pytest.raises(ValueError, match="not a little-endian ELF64 file"):
        hide_symbols(b"#!/bin/sh", [])


LAUNCHED = """
import os, sys, torch
print(__name__, sys.argv[1:], torch.npu.device_count())
print(torch.zeros(2, device="npu").cpu().tolist())
print("for children:", os.environ["NPU_KV_RUNTIME"], os.environ["NPU_KV_SIM_DEVICES"])
"""


@pytest.mark.parametrize("kind", ["script", "module", "code"])
def test_launching_a_program(run_script: RunScript, tmp_path: Path, kind: str) -> None:
    (tmp_path / "program.py").write_text(LAUNCHED)
    program = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", LAUNCHED]}
    result = run_script(
        f"""
        import runpy, sys

        sys.argv = ["simulator", "--devices", "2", *{program[kind]!r}, "--devices", "x"]
        runpy.run_module("npu_kv_ops.simulator", run_name="__main__", alter_sys=True)
        """,
        runtime=None,
        cwd=tmp_path,
    )
    assert result.stdout.splitlines() == [
        "__main__ ['--devices', 'x'] 2",
        "[0.0, 0.0]",
        "for children: sim 2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which program?"),
        (["--without", "aclrtFly", "-c", "pass"], "no function 'aclrtFly'"),
        (["--devices", "many", "-c", "pass"], "invalid int value"),
    ],
)
def test_launching_with_wrong_arguments(
    run_script: RunScript, arguments: list[str], message: str
) -> None:
    result = run_script(
        f"""
        import runpy, sys

        sys.argv = ["simulator", *{arguments!r}]
        runpy.run_module("npu_kv_ops.simulator", run_name="__main__", alter_sys=True)
        """,
        runtime=None,
        check=False,
    )
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_torchair_core_loads_and_refuses_the_graph_engine(run_script: RunScript) -> None:
    run_script(
        """
        import torch, torchair
        from torchair.core import _torchair

        try:
            _torchair.InitializeGraphEngine({})
        except RuntimeError as error:
            assert "ge::" in str(error), error
            assert "not simulated" in str(error), error
        else:
            raise SystemExit("the graph engine started")
        """
    )


def test_bounded_string_functions(sim: ModuleType) -> None:
    """CANN's C library lends torchair these; a wrong one would write past a buffer."""
    runtime = sim.library()
    size = ctypes.c_size_t
    room = ctypes.create_string_buffer(b"." * 15)
    assert runtime.strcpy_s(room, size(8), b"1234567") == 0
    assert room.raw[:9] == b"1234567\0."
    assert runtime.strcpy_s(room, size(8), b"12345678") != 0
    assert room.raw[:9] == b"\x00234567\0."
    assert runtime.strcpy_s(room, size(8), None) != 0
    assert runtime.snprintf_s(room, size(8), size(7), b"%d-%s", 42, b"abc") == 6
    assert room.value == b"42-abc"
    assert runtime.snprintf_s(room, size(8), size(3), b"%s", b"abcdef") == -1
    assert room.value == b"abc", "cut at the count"
    assert runtime.snprintf_s(room, size(4), size(9), b"%s", b"abcdef") == -1
    assert room.value == b"", "too small for what was asked"
    assert room.raw[8:] == b"......." + b"\0"

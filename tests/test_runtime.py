"""Which runtime a process gets, and what happens when the libraries do not fit it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from npu_kv_ops import runtime

if TYPE_CHECKING:
    from conftest import RunScript


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own for the libraries, which load() has not looked at yet."""
    monkeypatch.setattr(runtime, "_core_loaded", False)
    monkeypatch.setattr(runtime, "_npu_loaded", False)
    monkeypatch.setattr(runtime, "_loaded", None)
    monkeypatch.setattr(runtime, "_CORE", tmp_path / "libnpu_kv_core.so")
    monkeypatch.setattr(runtime, "_NPU", tmp_path / "libnpu_kv_npu.so")
    return tmp_path


def _install(folder: Path, name: str, **built_against: str) -> None:
    # Not a library: an attempt to load it before the versions are compared gives another error.
    (folder / f"lib{name}.so").write_text("not a library")
    (folder / f"{name}.json").write_text(json.dumps(built_against))


def _torch_version() -> str:
    import torch

    return torch.__version__


def test_runtime_of_this_process(process_runtime: str) -> None:
    assert runtime.current() == process_runtime
    assert runtime.load() == process_runtime
    assert runtime.load() == process_runtime


def test_libraries_were_built_for_this_torch() -> None:
    built = runtime.build_info().torch
    assert built is not None
    assert built.partition("+")[0] == _torch_version().partition("+")[0]


def test_npu_library_is_loaded(npu: object) -> None:
    import torch

    loaded = {Path(path).name for path in torch.ops.loaded_libraries}
    assert {"libnpu_kv_core.so", "libnpu_kv_npu.so"} <= loaded


@pytest.mark.parametrize("value", ["npu", "SIM", " sim"])
def test_unknown_runtime_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NPU_KV_RUNTIME", value)
    with pytest.raises(ValueError, match=r"NPU_KV_RUNTIME=.*allowed are cann, sim, host, auto"):
        runtime.current()


def test_empty_runtime_means_auto(monkeypatch: pytest.MonkeyPatch, process_runtime: str) -> None:
    monkeypatch.setenv("NPU_KV_RUNTIME", "")
    assert runtime.current() == process_runtime


@pytest.mark.parametrize("value", ["cann", "host"])
def test_active_simulator_against_the_variable(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NPU_KV_RUNTIME", value)
    with pytest.raises(RuntimeError, match=f"simulator is active, but NPU_KV_RUNTIME={value}"):
        runtime.current()


def test_missing_library_says_how_to_build(unloaded: Path) -> None:
    with pytest.raises(ImportError, match=r"libnpu_kv_core\.so is missing.*pip install"):
        runtime.load()


def test_library_for_another_torch(unloaded: Path) -> None:
    _install(unloaded, "npu_kv_core", torch="2.12.1+cpu")
    with pytest.raises(
        ImportError,
        match=r"built for torch 2\.12\.1\+cpu, this process has torch 2\.13.*pip install",
    ):
        runtime.load()


def test_library_of_unknown_origin(unloaded: Path) -> None:
    (unloaded / "libnpu_kv_core.so").write_text("not a library")
    with pytest.raises(ImportError, match=r"built for torch \(unknown\), this process has"):
        runtime.load()


def test_another_variant_of_the_same_torch_is_tried(unloaded: Path) -> None:
    _install(unloaded, "npu_kv_core", torch=f"{_torch_version().partition('+')[0]}+cu999")
    with pytest.raises(ImportError, match=r"can not be loaded: .*\+cu999.*pip install"):
        runtime.load()


def test_npu_library_is_missing(
    sim: ModuleType, unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(unloaded, "npu_kv_core", torch=_torch_version())
    monkeypatch.setattr(runtime, "_core_loaded", True)
    with pytest.raises(ImportError, match=r"libnpu_kv_npu\.so is missing: torch_npu was not"):
        runtime.load()


def test_npu_library_for_another_torch_npu(
    sim: ModuleType, unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(unloaded, "npu_kv_core", torch=_torch_version())
    _install(unloaded, "npu_kv_npu", torch=_torch_version(), torch_npu="2.12.0")
    monkeypatch.setattr(runtime, "_core_loaded", True)
    with pytest.raises(ImportError, match=r"built for torch_npu 2\.12\.0, this process has"):
        runtime.load()


@pytest.mark.parametrize(
    ("variable", "folder"), [("LD_LIBRARY_PATH", "."), ("ASCEND_HOME_PATH", "lib64")]
)
def test_cann_is_found(
    no_cann: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, folder: str
) -> None:
    library = tmp_path / folder / "libascendcl.so"
    library.parent.mkdir(exist_ok=True)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert runtime.cann_library() is None
    library.touch()
    found = runtime.cann_library()
    assert found is not None
    assert Path(found).samefile(library)


def test_simulated_library_is_not_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    before = runtime.cann_library()
    simulated = Path(runtime.__file__).parent / "lib" / "simulator"
    assert (simulated / "libascendcl.so").is_file()
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(simulated))
    assert runtime.cann_library() == before


def test_package_imports_no_torch(run_script: RunScript) -> None:
    run_script(
        """
        import sys
        import npu_kv_ops, npu_kv_ops.simulator, npu_kv_ops.runtime, npu_kv_ops.errors
        npu_kv_ops.TransferError, npu_kv_ops.__version__, dir(npu_kv_ops)
        loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "torch_npu", "numpy"}
        if loaded:
            sys.exit(f"imported: {loaded}")
        """,
        runtime=None,
    )


def test_unknown_name_is_an_attribute_error() -> None:
    import npu_kv_ops

    with pytest.raises(AttributeError, match="no_such_name"):
        npu_kv_ops.no_such_name  # noqa: B018


def test_every_public_name_exists() -> None:
    import npu_kv_ops

    for name in set(npu_kv_ops.__all__) - {"graph_passes"}:
        assert getattr(npu_kv_ops, name) is not None, name
        assert name in dir(npu_kv_ops)


def test_host_runs_a_script_that_starts_with_torch(run_script: RunScript) -> None:
    result = run_script(
        """
        import torch
        import sys
        import npu_kv_ops
        src, dst = torch.arange(8).reshape(4, 2), torch.zeros(4, 2, dtype=torch.int64)
        npu_kv_ops.swap_blocks_batch([src], [dst], torch.tensor([1, 2]), torch.tensor([3, 0]))
        print(npu_kv_ops.runtime.load(), "torch_npu" in sys.modules, dst.flatten().tolist())
        """,
        runtime="host",
    )
    assert result.stdout.strip() == "host False [4, 5, 0, 0, 0, 0, 2, 3]"


@pytest.mark.npu
def test_sim_runs_a_script_that_starts_with_torch(run_script: RunScript) -> None:
    result = run_script(
        """
        import torch
        import os
        import npu_kv_ops
        print(npu_kv_ops.runtime.load(), torch.npu.is_available())
        print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"))
        """,
        runtime="sim",
    )
    assert result.stdout.split() == ["sim", "True", "1"]


@pytest.mark.npu
def test_load_activates_the_simulator_and_leaves_autoload_to_children(
    run_script: RunScript,
) -> None:
    result = run_script(
        """
        import os
        os.environ["NPU_KV_RUNTIME"] = "sim"
        from npu_kv_ops import runtime
        print(runtime.current(), runtime.load())
        print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"))
        """,
        runtime=None,
    )
    assert result.stdout.split() == ["sim", "sim", "1"]


@pytest.mark.npu
def test_nothing_chosen_is_an_error_that_can_be_recovered_from(
    run_script: RunScript, no_cann: None
) -> None:
    result = run_script(
        """
        import sys
        from npu_kv_ops import runtime, simulator
        for ask in (runtime.current, runtime.load):
            try:
                ask()
            except RuntimeError as error:
                print(error)
        print("torch" in sys.modules)
        simulator.activate()
        print(runtime.load())
        """,
        runtime=None,
    )
    first, second, imported, loaded = result.stdout.splitlines()
    assert first == second
    for advice in ("NPU_KV_RUNTIME=sim", "simulator.activate()", "NPU_KV_RUNTIME=host"):
        assert advice in first
    assert (imported, loaded) == ("False", "sim")


@pytest.mark.npu
def test_cann_without_cann_says_what_to_do(run_script: RunScript, no_cann: None) -> None:
    result = run_script(
        """
        from npu_kv_ops import runtime
        try:
            runtime.load()
        except ImportError as error:
            print(error)
        """,
        runtime="cann",
    )
    assert "CANN found: none" in result.stdout
    assert "NPU_KV_RUNTIME=sim" in result.stdout


def test_simulator_without_torch_npu_says_what_to_install(run_script: RunScript) -> None:
    result = run_script(
        """
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "torch_npu" else find(name)
        from npu_kv_ops import runtime
        try:
            runtime.load()
        except ImportError as error:
            print(error)
        """,
        runtime="sim",
    )
    assert "pip install 'npu_kv_ops[npu]'" in result.stdout


def test_threads_that_load_at_once_agree(run_script: RunScript, process_runtime: str) -> None:
    result = run_script(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from npu_kv_ops import runtime
        together = threading.Barrier(8)
        def load(_):
            together.wait()
            return runtime.load()
        with ThreadPoolExecutor(8) as pool:
            print(*pool.map(load, range(8)))
        """,
        runtime=process_runtime,
    )
    assert result.stdout.split() == [process_runtime] * 8


def test_failed_activation_at_start_is_reported_and_survived(run_script: RunScript) -> None:
    result = run_script("print('alive')", runtime="sim", env={"NPU_KV_SIM_DEVICES": "not a number"})
    assert result.stdout.strip() == "alive"
    assert "NPU_KV_RUNTIME=sim cannot be honoured" in result.stderr

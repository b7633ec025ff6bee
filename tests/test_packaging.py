"""The wheel, the editable wheel and the sdist hold what they must, and what they hold works."""

from __future__ import annotations

import csv
import email
import importlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

# The first build of a checkout compiles everything; `make test` has done so before.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "build_backend"
SIMULATOR_LIBRARIES = {
    f"npu_kv_ops/lib/simulator/lib{name}.so"
    for name in (
        "ascendcl",
        "acl_op_compiler",
        "hccl",
        "ge_runner",
        "graph",
        "acl_tdt_channel",
        "fmk_parser",
        "ascend_protobuf",
    )
}


def _run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "NPU_KV_RUNTIME"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        pytest.fail(f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
    return result


def _run_alone(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that sees no installed package, not even this one."""
    return _run(sys.executable, "-I", "-S", "-c", code, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel from an isolated build, which must find this environment's torch by itself."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ".")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-t", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree without anything that was built."""
    folder = tmp_path_factory.mktemp("sources") / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "lib", ".*_cache"
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def _build(hook: str, sources: Path, folder: Path) -> Path:
    # Without CMake, which the wheel's test has already run: only what setuptools itself puts there.
    code = f"""
import sys
sys.path.insert(0, "build_backend")
import npu_kv_build
npu_kv_build.CMakeBuild.run = lambda self: None
import npu_kv_backend
built = npu_kv_backend.{hook}({str(folder)!r})
print()
print(built)
"""
    return folder / _run(sys.executable, "-c", code, cwd=sources).stdout.splitlines()[-1]


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_binaries_and_modules(wheel: Path, process_runtime: str) -> None:
    names = _names(wheel)
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "npu_kv_ops").rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    passes = {f"npu_kv_ops/{p.relative_to(ROOT)}" for p in (ROOT / "graph_passes").rglob("*.py")}
    libraries = {
        "npu_kv_ops/lib/libnpu_kv_core.so",
        "npu_kv_ops/lib/libnpu_kv_sim_kernels.so",
        "npu_kv_ops/lib/npu_kv_core.json",
    }
    if process_runtime != "host":
        libraries |= {"npu_kv_ops/lib/libnpu_kv_npu.so", "npu_kv_ops/lib/npu_kv_npu.json"}
    expected = modules | passes | libraries | SIMULATOR_LIBRARIES
    expected |= {"npu_kv_ops/py.typed", "npu_kv_ops.pth"}
    assert expected <= names
    assert any(name.startswith("npu_kv_ops/_C.") and name.endswith(".so") for name in names)


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    def top(name: str) -> str:
        return name.partition("/")[0]

    others = {top(name) for name in _names(wheel) if not top(name).endswith(".dist-info")}
    assert others == {"npu_kv_ops", "npu_kv_ops.pth"}


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    required = metadata.get_all("Requires-Dist") or []
    assert {"torch<2.14,>=2.13", 'torch_npu==2.13.0; extra == "npu"'} <= set(required)
    assert "npu-kv = npu_kv_ops.cli:main" in entry_points


def test_wheel_works_in_another_folder(installed: Path, run_script: RunScript) -> None:
    result = run_script(
        """
        import torch
        import npu_kv_ops
        import npu_kv_ops.graph_passes
        print(npu_kv_ops.__file__)
        print(npu_kv_ops.graph_passes.__file__)
        src, dst = torch.arange(4).reshape(2, 2), torch.zeros(2, 2, dtype=torch.int64)
        npu_kv_ops.swap_blocks_batch([src], [dst], torch.tensor([1]), torch.tensor([0]))
        print(dst.tolist())
        """,
        runtime="host",
        env={"PYTHONPATH": str(installed)},
        cwd=installed,
    )
    package, passes, copied = result.stdout.splitlines()
    assert Path(package).parent == installed / "npu_kv_ops"
    assert Path(passes).parent == installed / "npu_kv_ops" / "graph_passes"
    assert copied == "[[2, 3], [0, 0]]"


@pytest.mark.npu
def test_pth_file_starts_the_simulator(installed: Path, run_script: RunScript) -> None:
    # addsitedir treats the folder as Python treats site-packages when it starts.
    result = run_script(
        f"""
        import os, site, sys
        os.environ["NPU_KV_RUNTIME"] = "sim"
        sys.path.insert(0, {str(installed)!r})
        site.addsitedir({str(installed)!r})
        import torch
        import npu_kv_ops
        print(npu_kv_ops.__file__)
        print(npu_kv_ops.runtime.load(), torch.npu.is_available())
        """,
        runtime=None,
        env={"PYTHONPATH": str(installed)},
        cwd=installed,
    )
    package, runtime = result.stdout.splitlines()
    assert Path(package).parent == installed / "npu_kv_ops"
    assert runtime == "sim True"


@pytest.mark.parametrize("value", ["", "auto", "cann", "SIM"])
def test_pth_file_does_nothing_unless_asked(tmp_path: Path, value: str) -> None:
    result = _run_alone(
        f"""
import os, site, sys
os.environ["NPU_KV_RUNTIME"] = {value!r}
modules, variables = set(sys.modules), dict(os.environ)
site.addsitedir({str(BACKEND)!r})
print(set(sys.modules) == modules, dict(os.environ) == variables)
""",
        tmp_path,
    )
    assert result.stdout.strip() == "True True"
    assert result.stderr == ""


def test_editable_wheel(sources: Path, tmp_path: Path) -> None:
    wheel = _build("build_editable", sources, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        rows = {row[0] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        folder = tmp_path / "site"
        archive.extractall(folder)
    assert len(names) == len(set(names))
    assert rows == set(names)
    assert "npu_kv_ops.pth" in names

    result = _run_alone(
        f"""
import importlib.util, os, site
os.environ["NPU_KV_RUNTIME"] = "host"
site.addsitedir({str(folder)!r})
print(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
import npu_kv_ops
print(npu_kv_ops.__file__)
print(importlib.util.find_spec("npu_kv_ops.graph_passes").origin)
""",
        tmp_path,
    )
    autoload, package, passes = result.stdout.splitlines()
    assert autoload == "0"
    assert Path(package).parent == sources / "npu_kv_ops"
    assert Path(passes).parent == sources / "graph_passes"


def test_sdist_holds_all_sources_and_nothing_built(sources: Path, tmp_path: Path) -> None:
    archive = _build("build_sdist", sources, tmp_path)
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames() if tar.getmember(name).isfile()}
    top = {"CMakeLists.txt", "setup.py", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md"}
    folders = ("csrc", "npu_kv_ops", "graph_passes", "build_backend", "requirements", "tests")
    expected = top | {
        str(path.relative_to(sources))
        for folder in folders
        for path in (sources / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


@pytest.fixture
def build_modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The build backend's two modules, which only a build has on its path otherwise."""
    monkeypatch.syspath_prepend(str(BACKEND))
    return importlib.import_module("npu_kv_build"), importlib.import_module("npu_kv_backend")


def _package(folder: Path, version: str) -> str:
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    return str(folder)


def test_build_prefers_the_torch_on_its_own_path(
    build_modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = _package(tmp_path / "a", "2.13.0"), _package(tmp_path / "b", "2.13.1")
    seen = {(): {"torch": here}, ("-E",): {"torch": there}}
    build, _ = build_modules
    monkeypatch.setattr(build, "_package_folders", lambda *options: seen[options])
    found = build.find_torch()
    assert (found.version, found.npu_version) == ("2.13.0", None)


def test_isolated_build_asks_the_environment(
    build_modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {
        "torch": _package(tmp_path / "torch", "2.13.0+cpu"),
        "torch_npu": _package(tmp_path / "torch_npu", "2.13.0"),
    }
    build, backend = build_modules
    monkeypatch.setattr(
        build, "_package_folders", lambda *options: folders if options == ("-E",) else {}
    )
    found = build.find_torch()
    assert (found.version, found.npu_version) == ("2.13.0+cpu", "2.13.0")
    assert not [line for line in backend._machine_requires() if line.startswith("torch")]
    monkeypatch.setenv("NPU_KV_BUILD_NPU", "0")
    found = build.find_torch()
    assert (found.version, found.npu_folder) == ("2.13.0+cpu", None)


def test_build_requires_torch_where_there_is_none(
    build_modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, backend = build_modules
    monkeypatch.setattr(build, "_package_folders", lambda *options: {})
    assert build.find_torch() is None
    assert "torch==2.13.0" in backend._machine_requires()

"""The setuptools commands of this project: CMake builds the binaries, a .pth file goes along.

Run as a script it prints the CMake build folder that setup.py uses.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from setuptools import Command
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent.parent
PTH_FILE = Path(__file__).resolve().parent / "npu_kv_ops.pth"


@dataclass(frozen=True)
class Torch:
    """The torch to build against, and the torch_npu beside it if there is one."""

    folder: Path
    version: str
    npu_folder: Path | None
    npu_version: str | None


def _package_version(folder: Path) -> str:
    found = re.search(
        r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE
    )
    if found is None:
        raise SetupError(f"{folder / 'version.py'} names no __version__")
    return found.group(1)


# Finds packages without importing them: an import of a torch that has torch_npu beside it fails on
# a machine without CANN.
_PRINT_FOLDERS = """
import importlib.util, json, os
found = {}
for name in ("torch", "torch_npu"):
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        found[name] = os.path.dirname(spec.origin)
print(json.dumps(found))
"""


def _package_folders(*options: str) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, *options, "-c", _PRINT_FOLDERS],
        capture_output=True,
        text=True,
        check=False,
        cwd=sysconfig.get_path("scripts"),
    )
    if result.returncode != 0:
        raise SetupError(f"cannot ask {sys.executable} for its packages: {result.stderr.strip()}")
    folders: dict[str, str] = json.loads(result.stdout)
    return folders


def find_torch() -> Torch | None:
    """Find torch for the build: in this process's search path, else in its interpreter's own.

    Build isolation works through PYTHONPATH, which -E ignores, while the interpreter stays that of
    the environment that will be installed into.
    """
    folders = _package_folders()
    if "torch" not in folders:
        folders = _package_folders("-E")
    if "torch" not in folders:
        return None
    folder = Path(folders["torch"])
    npu_folder = Path(folders["torch_npu"]) if "torch_npu" in folders else None
    if os.environ.get("NPU_KV_BUILD_NPU", "1") == "0":
        npu_folder = None
    npu_version = _package_version(npu_folder) if npu_folder else None
    return Torch(folder, _package_version(folder), npu_folder, npu_version)


def find_program(name: str) -> str | None:
    """Find a build tool on PATH or among the scripts of this interpreter's environment."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def cmake_build_dir(torch: Torch) -> Path:
    """Return the folder that keeps the objects from one build to the next.

    One per Python and torch, so that a change of either never mixes objects.
    """
    chosen = os.environ.get("NPU_KV_BUILD_DIR")
    if chosen:
        return Path(chosen).resolve()
    npu = f"-npu{torch.npu_version}" if torch.npu_version else ""
    return ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-torch{torch.version}{npu}"


def _replace(source: Path, target: Path) -> None:
    # A rename leaves the old file whole for processes that have it mapped.
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    shutil.copy2(source, temporary)
    temporary.replace(target)


class CMakeBuild(build_ext):
    """Builds every binary of the package with CMake and puts them into the package folder."""

    def _package_dir(self) -> Path:
        if self.inplace or self.editable_mode:
            return ROOT / "npu_kv_ops"
        return Path(self.build_lib).resolve() / "npu_kv_ops"

    def run(self) -> None:
        """Configure, build, and copy what was built."""
        torch = find_torch()
        if torch is None:
            raise SetupError("torch is not installed: install torch==2.13.0 first")
        tools = {name: find_program(name) for name in ("cmake", "ninja")}
        missing = [name for name, path in tools.items() if path is None]
        if missing:
            raise SetupError(f"not found: {', '.join(missing)} (pip install cmake ninja)")

        build_dir = cmake_build_dir(torch)
        products = build_dir / "package"
        npu = f"torch_npu {torch.npu_version}" if torch.npu_folder else "no NPU library"
        print(f"npu_kv_ops: building for torch {torch.version}, {npu}, in {build_dir}", flush=True)
        self._cmake(
            tools["cmake"] or "",
            ["-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"],
            [
                f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
                f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
                f"-DNPU_KV_PYTHON={sys.executable}",
                f"-DNPU_KV_TORCH_DIR={torch.folder}",
                f"-DNPU_KV_TORCH_NPU_DIR={torch.npu_folder or ''}",
                f"-DNPU_KV_OUTPUT_DIR={products}",
                f"-DNPU_KV_BUILD_TESTS={os.environ.get('NPU_KV_BUILD_TESTS', '0')}",
                # A compiler that is newer than the sources may warn of more: whoever installs from
                # an sdist, which has a PKG-INFO, is not to be stopped by that.
                f"-DNPU_KV_WERROR={'OFF' if (ROOT / 'PKG-INFO').exists() else 'ON'}",
            ],
        )
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        self._cmake(tools["cmake"] or "", ["--build", str(build_dir), "--parallel", jobs])
        self._install(products, self._package_dir())

    @staticmethod
    def _cmake(cmake: str, *arguments: list[str]) -> None:
        command = [cmake, *(word for part in arguments for word in part)]
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise ExecError(f"{' '.join(command[:3])} ... ended with {error.returncode}") from None

    @staticmethod
    def _install(products: Path, package: Path) -> None:
        built = {path.relative_to(products) for path in products.rglob("*") if path.is_file()}
        for path in sorted(built):
            _replace(products / path, package / path)
        # What an earlier build left and this one does not make (the NPU library without torch_npu).
        for old in (package / "lib").rglob("*"):
            if old.is_file() and old.relative_to(package) not in built:
                old.unlink()

    def get_outputs(self) -> list[str]:
        """List the binaries where a build that is not in place puts them."""
        return sorted(self.get_output_mapping()) or [
            str(path) for path in self._binaries(self._package_dir())
        ]

    def get_output_mapping(self) -> dict[str, str]:
        """Map binaries of an in-place build: where the wheel would have them, where they are."""
        if not (self.inplace or self.editable_mode):
            return {}
        source = self._package_dir()
        target = Path(self.build_lib) / "npu_kv_ops"
        return {
            str(target / path.relative_to(source)): str(path) for path in self._binaries(source)
        }

    @staticmethod
    def _binaries(package: Path) -> list[Path]:
        libraries = [path for path in (package / "lib").rglob("*") if path.is_file()]
        return sorted([*libraries, *package.glob(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")])


class CleanBuild(build):
    """Starts from an empty build_lib: a module that was deleted must not live on in the wheel."""

    def run(self) -> None:
        """Run the build."""
        shutil.rmtree(Path(self.build_lib) / "npu_kv_ops", ignore_errors=True)
        super().run()


class BuildPython(build_py):
    """Puts the .pth file at the top of the wheel, that is, into site-packages."""

    def run(self) -> None:
        """Copy the Python modules and the .pth file."""
        super().run()
        if not self.editable_mode:
            _replace(PTH_FILE, Path(self.build_lib) / PTH_FILE.name)


class EditableWheel(editable_wheel):
    """Adds the .pth file to the editable wheel, which setuptools fills without asking build_py."""

    def run(self) -> None:
        """Build the editable wheel, then write it anew with the .pth file in it."""
        super().run()
        newest = max(Path(self.dist_dir).glob("*.whl"), key=lambda path: path.stat().st_mtime)
        _add_to_wheel(newest, PTH_FILE)


def _add_to_wheel(wheel: Path, file: Path) -> None:
    content = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    rewritten = wheel.with_suffix(".tmp")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(rewritten, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data += f"{file.name},sha256={digest},{len(content)}\n".encode()
                new.writestr(file.name, content)
            new.writestr(entry, data)
    rewritten.replace(wheel)


COMMANDS: dict[str, type[Command]] = {
    "build": CleanBuild,
    "build_ext": CMakeBuild,
    "build_py": BuildPython,
    "editable_wheel": EditableWheel,
}

if __name__ == "__main__":
    torch_for_build = find_torch()
    if torch_for_build is None:
        sys.exit("torch is not installed")
    print(cmake_build_dir(torch_for_build))

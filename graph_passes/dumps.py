"""Graphs before and after each pass, as text files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from torch.fx import GraphModule


class GraphDump:
    """The files of one graph: ``<number>_<step>_<pass>_before.txt`` and ``..._after.txt``.

    The number is claimed by creating ``<number>_report.txt``, which has to be new. So nothing is
    ever overwritten, whichever processes and threads write to the same folder.

    Args:
        folder: is made if it is missing.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        taken = (path.name.partition("_")[0] for path in folder.glob("*_report.txt"))
        first = 1 + max((int(number) for number in taken if number.isdecimal()), default=0)
        for number in itertools.count(first):
            self._start = folder / f"{number:04}"
            try:
                os.close(os.open(self._file("report"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                continue
            break
        self._step = 0

    def before(self, name: str, module: GraphModule) -> None:
        """Writes the graph that the pass ``name`` is given."""
        self._step += 1
        self._write(name, "before", module)

    def after(self, name: str, module: GraphModule, refused: bool = False) -> None:
        """Writes the graph that the pass ``name`` has made; ``refused``: it is not used."""
        self._write(name, "refused" if refused else "after", module)

    def report(self, text: str) -> None:
        """Writes what is to be said about the whole."""
        self._file("report").write_text(text + "\n")

    def _write(self, name: str, which: str, module: GraphModule) -> None:
        self._file(f"{self._step}_{name}_{which}").write_text(readable(module) + "\n")

    def _file(self, rest: str) -> Path:
        return self._start.with_name(f"{self._start.name}_{rest}.txt")


def readable(module: GraphModule) -> str:
    """The graph as Python with shapes, or plainly if a pass has left it so that it is no Python."""
    try:
        return module.print_readable(print_output=False, include_stride=True, include_device=True)
    except Exception as error:
        return f"{error}\n{module.graph}"

"""Runs the passes, in order, and goes back where one of them was wrong."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule

from . import functional_graph as functional
from .check import Check, Dependences
from .dumps import GraphDump, readable
from .identity import digest
from .merge import Merge
from .overlap import Overlap
from .reinplace import Reinplace
from .snapshots import Snapshot, is_unchanged, restore, snapshot

_log = logging.getLogger(__package__)
_SPLIT = {"swap_blocks_start", "swap_blocks_wait"}
_DISABLED = "NPU_KV_DISABLE_PASSES"
_DUMP_TO = "NPU_KV_DUMP_GRAPHS"


@runtime_checkable
class GraphPass(Protocol):
    """What the manager runs.

    ``name``, of letters, digits, ``_`` and ``-``, is what the pass is switched off and reported by.
    ``__call__`` changes the graph in place, leaves it so that ``graph.lint()`` passes, and returns
    how many changes it has made: 0 if and only if the graph is as it was.

    Two attributes it may have besides:

    - ``changes_transfers = True`` for a pass that means to drop transfers, or to add some, and runs
      behind ``reinplace``: the order of accesses is judged anew from the graph that it leaves.
      That of others has to have every transfer of the graph they are given.
    - ``uuid()``, a string that tells whether two passes do the same, for inductor's cache. Without
      it: the source of the class, and its attributes if they are plain numbers and strings.
    """

    name: str

    def __call__(self, graph: Graph, /) -> int:
        """Changes ``graph``; returns the number of changes."""


@dataclass(frozen=True)
class PassRun:
    """What one pass did.

    Attributes:
        name: of the pass.
        changes: how many it made; 0 if it was refused.
        seconds: it took, without the check.
        nodes_before: of the graph.
        nodes_after: of the graph; as before if it was refused.
        refused: why its graph is not used, if it is not.
    """

    name: str
    changes: int
    seconds: float
    nodes_before: int
    nodes_after: int
    refused: str | None = None

    def __str__(self) -> str:
        time_taken = f"{self.seconds * 1e3:.1f} ms"
        if self.refused is not None:
            return f"{self.name}: refused after {time_taken}: {self.refused}"
        nodes = f"{self.nodes_before} -> {self.nodes_after} nodes"
        return f"{self.name}: {self.changes} changes, {nodes}, {time_taken}"


@dataclass(frozen=True)
class PassReport:
    """What all passes did to one graph; empty for a graph without operators of this package.

    Attributes:
        passes: in the order in which they ran.
        seconds: all of it took, with checks, copies of graphs and files.
    """

    passes: tuple[PassRun, ...] = ()
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the graph is another than before."""
        return any(run.changes for run in self.passes)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.passes), f"all: {self.seconds * 1e3:.1f} ms"])


def default_passes() -> tuple[GraphPass, ...]:
    """New instances of the passes of this package, in their order."""
    return (Reinplace(), Merge(), Overlap())


class PassManager:
    """Runs passes on the graphs of a compiler, and the check behind those that could break order.

    Args:
        passes: in their order; None: those of :func:`default_passes`.
        disable: names of passes to leave out; ``check`` leaves out the check.
        dump_to: folder for the graphs before and after each pass, see :class:`~.dumps.GraphDump`.

    The environment is read at every call: ``NPU_KV_DISABLE_PASSES=merge,overlap`` leaves out more,
    ``NPU_KV_DUMP_GRAPHS=folder`` is for managers that have no ``dump_to``.

    A pass that raises, or whose graph the check refuses, is logged as an error with its name and
    the reason, and the later ones go on from the graph before it.

    Safe from several threads, if the passes are.

    Raises:
        TypeError: a pass that is none.
        ValueError: a name of ``disable`` that no pass has; two passes of one name.
    """

    def __init__(
        self,
        passes: Sequence[GraphPass] | None = None,
        disable: Collection[str] = (),
        dump_to: str | os.PathLike[str] | None = None,
    ) -> None:
        self.passes = default_passes() if passes is None else tuple(passes)
        for one in self.passes:
            if not isinstance(one, GraphPass) or isinstance(one, type):
                raise TypeError(f"passes: {one!r} is no pass: it needs a name and __call__(graph)")
            if not isinstance(one.name, str) or not one.name.replace("-", "_").isidentifier():
                raise ValueError(f"passes: {one!r} has the name {one.name!r}, which is no name")
        names = [one.name for one in self.passes]
        for name in names:
            if names.count(name) > 1 or name == Check.name:
                raise ValueError(f"passes: more than one is named {name!r}")
        if isinstance(disable, str):
            raise TypeError(f"disable must be a list of names, got {disable!r}")
        self._known = {*names, Check.name}
        _must_be_known(disable, self._known, "disable")
        self._disable = frozenset(disable)
        self._dump_to = None if dump_to is None else Path(dump_to)

    def disabled(self) -> frozenset[str]:
        """The passes that are left out now.

        Raises:
            ValueError: ``NPU_KV_DISABLE_PASSES`` has a name that no pass has.
        """
        asked = os.environ.get(_DISABLED, "").split(",")
        names = {name.strip() for name in asked} - {""}
        _must_be_known(names, self._known | {one.name for one in default_passes()}, _DISABLED)
        return self._disable | names

    def dump_to(self) -> Path | None:
        """The folder that graphs are written to now."""
        if self._dump_to is not None:
            return self._dump_to
        folder = os.environ.get(_DUMP_TO)
        return Path(folder) if folder else None

    def uuid(self) -> str | None:
        """The same for managers that do the same, in this process and in others.

        None when that cannot be told of a pass (see :class:`GraphPass`), and while graphs are
        written to a folder: a compiler that took its result from a cache would write none.
        """
        if self.dump_to() is not None:
            return None
        disabled = self.disabled()
        passes = digest(one for one in self.passes if one.name not in disabled)
        return passes and f"{passes} {Check.name not in disabled}"

    def __call__(self, module: GraphModule) -> PassReport:
        """Runs the passes on the graph of ``module``, and recompiles it if one has changed it.

        Raises:
            GraphOrderError: the program itself touches memory that is under way, or has a start
                without its waits, or a wait without its start.
            ValueError: see :meth:`disabled`.
            OSError: the graphs cannot be written to the folder that was asked for.
        """
        operators = _operators(module.graph)
        if not operators:
            return PassReport()
        started = time.perf_counter()
        disabled = self.disabled()
        check = None if Check.name in disabled else Check()
        if check is not None and operators & _SPLIT:
            check(module.graph)
        folder = self.dump_to()
        dump = None if folder is None else GraphDump(folder)
        passes = [one for one in self.passes if one.name not in disabled]
        # What comes before it, and it itself, work on a graph in which values have the order.
        functional_ones = [one.name == Reinplace.name for one in passes]
        last = functional_ones.index(True) if True in functional_ones else -1
        steps = _Steps(module, dump)
        runs = tuple(steps.run(one, check if i > last else None) for i, one in enumerate(passes))
        if steps.touched:
            module.recompile()
        report = PassReport(runs, time.perf_counter() - started)
        if dump is not None:
            dump.report(str(report))
        counters["npu_kv"]["graphs"] += 1
        _log.info("%d passes in %.1f ms", len(runs), report.seconds * 1e3)
        return report


class _Steps:
    """The passes on one graph, one after the other."""

    def __init__(self, module: GraphModule, dump: GraphDump | None) -> None:
        self.touched = False
        self._module = module
        self._graph = module.graph
        self._dump = dump
        self._kept: Snapshot | None = None
        self._before: Dependences | None = None

    def run(self, one: GraphPass, check: Check | None) -> PassRun:
        """Runs a pass; ``check``: judges it, if the order of nodes is what there is to judge."""
        if self._kept is None:
            self._kept = snapshot(self._graph)
        if self._dump is not None:
            self._dump.before(one.name, self._module)
        nodes, started, refused = len(self._graph.nodes), time.perf_counter(), None
        try:
            if check is not None and self._before is None:
                self._before = Dependences.of(self._graph)
            started = time.perf_counter()
            changes = one(self._graph)
            seconds = time.perf_counter() - started
            self._judge(one, changes, check)
        except Exception as error:
            seconds = time.perf_counter() - started
            changes, refused = 0, f"{type(error).__name__}: {error}"
            _log.exception("%s is refused, the graph before it is used: %s", one.name, refused)
        if self._dump is not None:
            self._dump.after(one.name, self._module, refused is not None)
        if refused is not None:
            restore(self._graph, self._kept)
            self._kept = None
            counters["npu_kv"][f"{one.name} refused"] += 1
        elif changes:
            self._kept = None
        self.touched |= bool(changes) or refused is not None
        run = PassRun(one.name, changes, seconds, nodes, len(self._graph.nodes), refused)
        counters["npu_kv"][one.name] += changes
        if refused is None:
            _log.info("%s", run)
            if changes and _log.isEnabledFor(logging.DEBUG):
                _log.debug("behind %s:\n%s", one.name, readable(self._module))
        return run

    def _judge(self, one: GraphPass, changes: object, check: Check | None) -> None:
        if not isinstance(changes, int) or isinstance(changes, bool) or changes < 0:
            raise TypeError(
                f"a pass returns the number of its changes, this one returned {changes!r}"
            )
        if not changes:
            if self._kept is not None and not is_unchanged(self._graph, self._kept):
                raise ValueError("it has changed the graph and returned 0")
            return
        self._graph.lint()
        if check is None or self._before is None:
            return
        if getattr(one, "changes_transfers", False):
            check(self._graph)
            self._before = None
        else:
            check.verify(self._graph, self._before)


def _operators(graph: Graph) -> set[str]:
    """The operators of this package that are in a graph, functional or not, without overloads."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    targets += [node.args[0] for node in functional.operator_nodes(graph)]
    ours = (one for one in targets if getattr(one, "namespace", None) == "npu_kv")
    return {one._schema.name.partition("::")[2] for one in ours}


def _must_be_known(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: no pass is named {name!r}; there are {sorted(known)}")

"""What tells two sets of passes apart, for a compiler's cache of what they made."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path

from npu_kv_ops import __version__

from .memory import declared

_PLAIN = (bool, int, float, str, bytes, type(None))


def digest(passes: Iterable[object]) -> str | None:
    """The same for passes that do the same; None if that cannot be told of one of them.

    Of each: ``uuid()`` if it has that; else the file that its class is in, and its attributes,
    which have to be plain. What that file imports is not looked at. It cannot be told of classes
    with slots, nor of those made in a function, which may close over anything.
    """
    found = [_own_sources(), *declared()]
    for one in passes:
        part = _identity(one)
        if part is None:
            return None
        found.append(part)
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _identity(one: object) -> str | None:
    uuid = getattr(one, "uuid", None)
    if uuid is not None:
        return None if (told := uuid()) is None else str(told)
    kind = type(one)
    attributes = getattr(one, "__dict__", {})
    if not all(isinstance(value, _PLAIN) for value in attributes.values()):
        return None
    if "<locals>" in kind.__qualname__ or any(hasattr(base, "__slots__") for base in kind.__mro__):
        return None
    try:
        source = inspect.getsourcefile(kind)
    except TypeError:  # a class that was typed in
        return None
    if source is None or not Path(source).is_file():
        return None
    return repr((kind.__qualname__, _hash(Path(source)), sorted(attributes.items())))


@functools.cache
def _own_sources() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return repr((__version__, [(source.name, _hash(source)) for source in sources]))


def _hash(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()

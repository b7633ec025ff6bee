"""The dynamic symbols of a shared library: listing them, and hiding some of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap

__all__ = ["Symbol", "dynamic_symbols", "hide_symbols"]

_DYNAMIC_SYMBOLS = 11  # section type
_SYMBOL = struct.Struct("<IBBHQQ")
_WEAK = 2


@dataclass(frozen=True)
class Symbol:
    """One entry of the table.

    Attributes:
        name: the name without a version.
        defined: whether this library defines it, or needs it from another one.
        weak: whether a missing definition is no error.
        offset: where the name is in the file.
    """

    name: str
    defined: bool
    weak: bool
    offset: int


def dynamic_symbols(image: bytes | mmap) -> Iterator[Symbol]:
    """Yield the dynamic symbols of a little-endian ELF64 file.

    Raises:
        ValueError: not such a file, or its section headers were stripped.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian ELF64 file")
    (headers,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, entries = struct.unpack_from("<HH", image, 58)
    sections = [
        struct.unpack_from("<IIQQQQII", image, headers + index * entry_bytes)
        for index in range(entries)
    ]
    for section in sections:
        if section[1] != _DYNAMIC_SYMBOLS:
            continue
        offset, size, strings = section[4], section[5], sections[section[6]]
        text = image[strings[4] : strings[4] + strings[5]]
        for name, info, _, home, _, _ in _SYMBOL.iter_unpack(image[offset : offset + size]):
            if name:
                end = text.index(b"\0", name)
                yield Symbol(
                    text[name:end].decode(), home != 0, info >> 4 == _WEAK, strings[4] + name
                )
        return
    raise ValueError("the file has no table of dynamic symbols")


def hide_symbols(image: bytes, names: Sequence[str]) -> bytes:
    """Return a copy of the library in which functions it defines can no longer be found.

    Their names are misspelt in the symbol table; their code, and calls within the library, stay.

    Raises:
        ValueError: the library does not define a name, or another name shares its bytes.
    """
    symbols = list(dynamic_symbols(image))
    changed = bytearray(image)
    for name in names:
        own = [symbol for symbol in symbols if symbol.name == name and symbol.defined]
        if len(own) != 1:
            raise ValueError(f"the simulated runtime has no function {name!r} to leave out")
        begin = own[0].offset
        sharing = [
            symbol.name
            for symbol in symbols
            if symbol is not own[0] and symbol.offset <= begin < symbol.offset + len(symbol.name)
        ]
        if sharing:
            raise ValueError(f"{name!r} cannot be left out: its bytes are part of {sharing[0]!r}")
        changed[begin] = ord("~")
    return bytes(changed)

"""Requests of a trace, and the blocks they need."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HASH_TOKENS = 512
"""Tokens covered by one entry of `hash_ids`."""

BlockKey = tuple[int, ...]
"""Names the content of one engine block; see `BlockMap`."""


class TraceError(ValueError):
    """A line of a trace that is broken.

    Attributes:
        line: its number, counted from 1.
    """

    def __init__(self, source: str, line: int, reason: str) -> None:
        super().__init__(f"{source}, line {line}: {reason}")
        self.line = line


@dataclass(frozen=True)
class Request:
    """One request: when it came, its lengths in tokens, and the ids of its prompt's hash blocks."""

    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def _integer(record: dict[str, Any], key: str, minimum: int) -> int:
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"'{key}' is {value!r}, it must be an integer")
    if value < minimum:
        raise ValueError(f"'{key}' is {value}, it must be {minimum} or more")
    return value


def _timestamp(record: dict[str, Any]) -> float:
    value = record["timestamp"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"'timestamp' is {value!r}, it must be a number of milliseconds")
    try:
        milliseconds = float(value)
    except OverflowError:
        milliseconds = math.inf
    if not math.isfinite(milliseconds) or milliseconds < 0:
        raise ValueError(f"'timestamp' is {value}, it must be finite and 0 or more")
    return milliseconds


def _hash_ids(record: dict[str, Any], input_length: int) -> tuple[int, ...]:
    value = record["hash_ids"]
    if not isinstance(value, list):
        raise ValueError(f"'hash_ids' is {value!r}, it must be a list of integers")
    seen: set[int] = set()
    for position, hash_id in enumerate(value):
        if isinstance(hash_id, bool) or not isinstance(hash_id, int):
            raise ValueError(f"'hash_ids'[{position}] is {hash_id!r}, it must be an integer")
        if hash_id < 0:
            raise ValueError(f"'hash_ids'[{position}] is {hash_id}, it must be 0 or more")
        if hash_id in seen:
            raise ValueError(
                f"'hash_ids'[{position}] repeats {hash_id}: an id stands for a whole prefix, "
                "so a prompt cannot hold it twice"
            )
        seen.add(hash_id)
    expected = -(-input_length // HASH_TOKENS)
    if len(value) != expected:
        raise ValueError(
            f"'hash_ids' has {len(value)} entries, but an 'input_length' of {input_length} "
            f"needs {expected} blocks of {HASH_TOKENS} tokens"
        )
    return tuple(value)


def parse_request(text: str, line: int) -> Request:
    """One line of a trace as a `Request`.

    Raises:
        ValueError: says what is wrong with the line.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a trace record: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {type(record).__name__}")
    missing = [
        key
        for key in ("timestamp", "input_length", "output_length", "hash_ids")
        if key not in record
    ]
    if missing:
        raise ValueError("no " + ", ".join(f"'{key}'" for key in missing))
    timestamp = _timestamp(record)
    input_length = _integer(record, "input_length", 1)
    output_length = _integer(record, "output_length", 0)
    return Request(line, timestamp, input_length, output_length, _hash_ids(record, input_length))


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """All requests of a JSON-lines file, or its first `limit`. Blank lines are passed over.

    The whole file is checked even when `limit` is smaller: a broken trace is better known about
    before a run than after.

    Raises:
        TraceError: at the first broken line, with its number.
        ValueError: the file holds no request.
        OSError: the file cannot be read.
    """
    requests: list[Request] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    requests.append(parse_request(text, number))
            except UnicodeDecodeError as error:
                reason = f"not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
                raise TraceError(str(path), number, reason) from None
            except ValueError as error:
                raise TraceError(str(path), number, str(error)) from None
    if not requests:
        raise ValueError(f"{path}: holds no requests")
    return requests[:limit]


def check_block_tokens(block_tokens: int) -> None:
    """Raises ValueError unless blocks of `block_tokens` tokens line up with hash blocks."""
    if block_tokens < 1 or (HASH_TOKENS % block_tokens and block_tokens % HASH_TOKENS):
        raise ValueError(
            f"block_tokens is {block_tokens}: it must divide {HASH_TOKENS} or be a multiple of it"
        )


@dataclass(frozen=True)
class BlockNeed:
    """The engine blocks of one request.

    Attributes:
        keys: one per full block of the prompt, in prompt order: these can be shared.
        private: the blocks after them, which hold the rest of the prompt and the output. No other
            request can hit them, so they are written, used and freed.
    """

    keys: tuple[BlockKey, ...]
    private: int

    @property
    def total(self) -> int:
        """Device blocks the request occupies at once."""
        return len(self.keys) + self.private


class BlockMap:
    """Maps hash blocks of 512 tokens onto engine blocks of `block_tokens` tokens.

    Smaller engine blocks: each hash block is cut, the key is `(hash_id, part)`. Larger ones: each
    covers several hash blocks, the key is the tuple of their ids. A block that the prompt does not
    fill has no key: its content is not settled by the hash ids alone.
    """

    def __init__(self, block_tokens: int) -> None:
        check_block_tokens(block_tokens)
        self.block_tokens = block_tokens

    def need(self, request: Request) -> BlockNeed:
        """The blocks that `request` needs."""
        size = self.block_tokens
        full = request.input_length // size
        total = -(-(request.input_length + request.output_length) // size)
        ids: Sequence[int] = request.hash_ids
        if size <= HASH_TOKENS:
            parts = HASH_TOKENS // size
            keys: tuple[BlockKey, ...] = tuple((ids[i // parts], i % parts) for i in range(full))
        else:
            group = size // HASH_TOKENS
            keys = tuple(tuple(ids[i * group : (i + 1) * group]) for i in range(full))
        return BlockNeed(keys, total - full)

    def describe(self, key: BlockKey) -> str:
        """`key` in the words of the trace."""
        if self.block_tokens < HASH_TOKENS:
            parts = HASH_TOKENS // self.block_tokens
            return f"hash id {key[0]} part {key[1] + 1}/{parts}"
        if self.block_tokens == HASH_TOKENS:
            return f"hash id {key[0]}"
        return "hash ids " + ", ".join(str(hash_id) for hash_id in key)

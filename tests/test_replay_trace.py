import json
from pathlib import Path

import pytest

from npu_kv_ops.replay.pools import TwoTierCache
from npu_kv_ops.replay.synthetic import synthetic_trace
from npu_kv_ops.replay.trace import BlockMap, Request, TraceError, parse_request, read_trace

GOOD = {"timestamp": 5, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 9]}


def line(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def without(key: str) -> str:
    return json.dumps({k: v for k, v in GOOD.items() if k != key})


def test_a_good_line_becomes_a_request() -> None:
    assert parse_request(line(extra="ignored"), 8) == Request(8, 5.0, 1100, 7, (3, 4, 9))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object but list"),
        ("7", "not a JSON object but int"),
        (without("timestamp"), "no 'timestamp'"),
        (without("input_length"), "no 'input_length'"),
        (without("output_length"), "no 'output_length'"),
        (without("hash_ids"), "no 'hash_ids'"),
        (line(timestamp="5"), "'timestamp' is '5'"),
        (line(timestamp=True), "'timestamp' is True"),
        (line(timestamp=-1), "'timestamp' is -1"),
        (line(timestamp=float("nan")), "'timestamp' is nan"),
        (line(timestamp=10**400), "must be finite"),
        (line(input_length=0, hash_ids=[]), "'input_length' is 0, it must be 1 or more"),
        (line(input_length=1100.0), "'input_length' is 1100.0, it must be an integer"),
        (line(output_length=-2), "'output_length' is -2, it must be 0 or more"),
        (line(output_length=None), "'output_length' is None"),
        (line(hash_ids="3,4,9"), "'hash_ids' is '3,4,9'"),
        (line(hash_ids=[3, 4, "9"]), r"'hash_ids'\[2\] is '9'"),
        (line(hash_ids=[3, True, 9]), r"'hash_ids'\[1\] is True"),
        (line(hash_ids=[3, -4, 9]), r"'hash_ids'\[1\] is -4"),
        (line(hash_ids=[3, 4, 3]), r"'hash_ids'\[2\] repeats 3"),
        (line(hash_ids=[3, 4]), "has 2 entries, but an 'input_length' of 1100 needs 3"),
        (line(hash_ids=[3, 4, 5, 6]), "has 4 entries, but an 'input_length' of 1100 needs 3"),
        (line(input_length=1024), "has 3 entries, but an 'input_length' of 1024 needs 2"),
    ],
)
def test_a_broken_line_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_request(text, 1)


def test_a_broken_line_is_named_even_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line()}\n\n{line()}\n{line(hash_ids=[])}\n")
    with pytest.raises(
        TraceError, match=r"trace\.jsonl, line 4: 'hash_ids' has 0 entries"
    ) as error:
        read_trace(path, limit=1)
    assert error.value.line == 4


def test_blank_lines_count_but_give_no_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line()}\n   \n{line(timestamp=6)}\n\n")
    assert [request.line for request in read_trace(path)] == [2, 4]
    assert [request.line for request in read_trace(path, limit=1)] == [2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no requests"),
        (b"\n \n", "holds no requests"),
        (line().encode() + b"\n\xff\n", "line 2: not UTF-8: byte 0xff at column 1"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_trace(path)


@pytest.mark.parametrize(
    ("block_tokens", "keys", "private"),
    [
        # 1100 prompt tokens and 7 of output, hash ids 3, 4, 9.
        (128, [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0), (4, 1), (4, 2), (4, 3)], 1),
        (64, [(h, part) for h in (3, 4) for part in range(8)] + [(9, 0)], 1),
        (4, [(h, part) for h in (3, 4) for part in range(128)] + [(9, p) for p in range(19)], 2),
        (512, [(3, 0), (4, 0)], 1),
        (1024, [(3, 4)], 1),
        (2048, [], 1),
    ],
)
def test_blocks_of_a_request(block_tokens: int, keys: list[tuple[int, ...]], private: int) -> None:
    need = BlockMap(block_tokens).need(parse_request(line(), 1))
    assert list(need.keys) == keys
    assert need.private == private


@pytest.mark.parametrize(
    ("input_length", "output_length", "full", "private"),
    [(512, 0, 4, 0), (512, 1, 4, 1), (511, 0, 3, 1), (511, 1, 3, 1), (511, 2, 3, 2)],
)
def test_output_starts_where_the_prompt_ends(
    input_length: int, output_length: int, full: int, private: int
) -> None:
    need = BlockMap(128).need(Request(1, 0, input_length, output_length, (0,)))
    assert (len(need.keys), need.private) == (full, private)
    assert need.total == full + private


@pytest.mark.parametrize("block_tokens", [0, -128, 3, 513, 768])
def test_block_tokens_that_do_not_line_up(block_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"block_tokens is {block_tokens}"):
        BlockMap(block_tokens)


@pytest.mark.parametrize(
    ("block_tokens", "key", "text"),
    [
        (128, (7, 3), "hash id 7 part 4/4"),
        (512, (7, 0), "hash id 7"),
        (1024, (7, 8), "hash ids 7, 8"),
    ],
)
def test_a_block_is_described_in_the_words_of_the_trace(
    block_tokens: int, key: tuple[int, ...], text: str
) -> None:
    assert BlockMap(block_tokens).describe(key) == text


def test_synthetic_traces_are_well_formed_and_repeatable() -> None:
    requests = synthetic_trace(150, seed=3)
    assert requests == synthetic_trace(150, seed=3)
    assert requests != synthetic_trace(150, seed=4)
    for number, request in enumerate(requests, start=1):
        text = json.dumps(
            {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
        )
        assert parse_request(text, number) == request


@pytest.mark.parametrize("seed", range(5))
def test_equal_synthetic_ids_are_equal_prefixes(seed: int) -> None:
    prefixes: dict[int, tuple[int, ...]] = {}
    for request in synthetic_trace(200, seed):
        for position, hash_id in enumerate(request.hash_ids):
            prefix = request.hash_ids[:position]
            assert prefixes.setdefault(hash_id, prefix) == prefix


@pytest.mark.parametrize("seed", range(5))
def test_synthetic_traces_show_all_kinds_of_hits(seed: int) -> None:
    needs = [BlockMap(128).need(request) for request in synthetic_trace(60, seed)]
    device_blocks = 2 * max(need.total for need in needs)
    cache = TwoTierCache(device_blocks, 4 * device_blocks, "eager")
    device_hits = host_hits = misses = 0
    for need in needs:
        step = cache.admit(need)
        cache.finish(step)
        device_hits += step.device_hits
        host_hits += len(step.loads)
        misses += len(step.computed)
    total = device_hits + host_hits + misses
    assert min(device_hits, host_hits, misses) > total / 20

"""Traces made up on the spot: chats of several turns that share prefixes."""

from __future__ import annotations

import random

from .trace import HASH_TOKENS, Request

_SYSTEM_PROMPTS = 4
_TURNS = (2, 6)
_GAP_MS = 250.0


def synthetic_trace(requests: int, seed: int = 0) -> list[Request]:
    """`requests` requests of chats that run side by side; the same `seed` gives the same trace.

    A chat starts from one of a few system prompts (so chats share their first blocks) and each
    turn's prompt holds the turns before it (so a chat shares with itself). Every other chat answers
    at once; the rest pause for long, and their blocks have left a small device pool by then. Some
    requests stand alone and are never seen again. So hits on the device, hits on the host and
    misses all occur.

    Raises:
        ValueError: `requests` is not positive.
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}, it must be 1 or more")
    rng = random.Random(seed)
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    system_prompts = [fresh(rng.randint(1, 3)) for _ in range(_SYSTEM_PROMPTS)]
    waiting: list[
        tuple[int, int, list[int], int]
    ] = []  # (due, order, full hash blocks, turns left)
    result: list[Request] = []
    for step in range(requests):
        due = [chat for chat in waiting if chat[0] <= step]
        if due:
            chat = min(due)
            waiting.remove(chat)
            history, turns = chat[2], chat[3]
        else:
            history, turns = list(rng.choice(system_prompts)), rng.randint(*_TURNS)
            if rng.random() < 0.15:
                history, turns = [], 1
        prompt = history + fresh(rng.randint(1, 6))
        tail = rng.randint(1, HASH_TOKENS - 1)
        result.append(
            Request(
                line=step + 1,
                timestamp_ms=step * _GAP_MS,
                input_length=len(prompt) * HASH_TOKENS + tail,
                output_length=rng.randint(16, 400),
                hash_ids=tuple(prompt + fresh(1)),
            )
        )
        if turns > 1:
            pause = 1 if rng.random() < 0.5 else rng.randint(8, 24)
            waiting.append((step + pause, step, prompt, turns - 1))
    return result

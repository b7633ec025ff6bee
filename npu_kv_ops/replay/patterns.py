"""The contents of KV blocks: made from a block's name, so that any other content is seen.

Word `w` (64 bits) of a block in one tensor is `seed ^ ramp[w]`. The seed mixes block, layer and
tensor; the ramp is the same for all. Another block, another layer or tensor, or content from before
differs in every word, since its seed differs. A copy that is shifted or stops early differs too,
since the ramp has no two equal words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: npt.ArrayLike) -> Words:
    """A bijection of 64-bit words that scatters neighbours (the finalizer of SplitMix64)."""
    z = np.asarray(values, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = z + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def ramp(words: int) -> Words:
    """The part of the pattern that all blocks share; its words are pairwise different."""
    return mix(np.arange(words, dtype=np.uint64))


def block_seeds(serials: npt.ArrayLike, planes: npt.ArrayLike) -> Words:
    """Seeds for every plane and block.

    Args:
        serials: a number for each block content, shape [blocks].
        planes: a number for each tensor of each layer, shape [planes].

    Returns:
        shape [planes, blocks].
    """
    plane_part = mix(mix(planes))
    return np.asarray(mix(mix(serials)[None, :] ^ plane_part[:, None]), dtype=np.uint64)


def write(target: Words, seeds: Words, shared_ramp: Words) -> None:
    """Fills `target` [planes, blocks, words] with the patterns of `seeds` [planes, blocks]."""
    np.bitwise_xor(seeds[:, :, None], shared_ramp[None, None, :], out=target)


def first_difference(actual: Words, expected: Words) -> int | None:
    """Offset of the first byte that differs, or None. Both are one block's contiguous words."""
    left: npt.NDArray[Any] = actual.view(np.uint8)
    different = left != expected.view(np.uint8)
    return int(different.argmax()) if different.any() else None

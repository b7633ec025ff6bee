import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_kv_ops.replay import patterns

WORDS = 64


def content(serial: int, plane: int) -> patterns.Words:
    words = np.zeros((1, 1, WORDS), dtype=np.uint64)
    patterns.write(words, patterns.block_seeds([serial], [plane]), patterns.ramp(WORDS))
    return np.asarray(words[0, 0], dtype=np.uint64)


numbers = st.integers(0, 2**63)
planes = st.integers(0, 1000)


@given(numbers, planes, numbers, planes)
def test_another_block_or_tensor_differs_in_every_word(
    serial: int, plane: int, other_serial: int, other_plane: int
) -> None:
    same = (serial, plane) == (other_serial, other_plane)
    equal = content(serial, plane) == content(other_serial, other_plane)
    assert equal.all() if same else not equal.any()


@given(numbers, planes, st.integers(1, 8 * WORDS - 1))
def test_a_shifted_copy_differs_from_the_start(serial: int, plane: int, shift: int) -> None:
    right = content(serial, plane)
    shifted = np.roll(right.view(np.uint8), shift).view(np.uint64)
    first = patterns.first_difference(shifted, right)
    assert first is not None
    assert first < 8


@given(numbers, planes, st.integers(0, 8 * WORDS - 1), st.integers(1, 255))
def test_the_first_wrong_byte_is_found(serial: int, plane: int, where: int, bits: int) -> None:
    right = content(serial, plane)
    wrong = right.copy()
    wrong.view(np.uint8)[where:] ^= np.uint8(bits)
    assert patterns.first_difference(wrong, right) == where
    assert patterns.first_difference(right, right) is None


@pytest.mark.parametrize("words", [1, 2, 1 << 16])
def test_a_ramp_has_no_equal_words(words: int) -> None:
    assert len(set(patterns.ramp(words).tolist())) == words


def test_all_planes_and_blocks_are_written_at_once() -> None:
    serials, plane_numbers = [5, 9, 2**62], [3, 4]
    words = np.zeros((2, 3, WORDS), dtype=np.uint64)
    patterns.write(words, patterns.block_seeds(serials, plane_numbers), patterns.ramp(WORDS))
    for i, plane in enumerate(plane_numbers):
        for j, serial in enumerate(serials):
            assert (words[i, j] == content(serial, plane)).all()

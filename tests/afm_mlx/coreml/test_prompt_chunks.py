"""Prompts in calls: every token once, in order, and as fast as any other way."""

import functools

from afm_mlx.coreml.prompt_chunks import DECODE, prompt_chunks
from tests.tools.cases import each


@each(
    "count, lengths, room, chunks",
    [
        (0, (64, 512), 100, []),
        (512, (64, 512), 0, [512]),
        (64 + 512, (64, 512), 100, [512, 64]),
        (40, (64, 512), 100, [64]),  # padding is cheaper than 40 steps
        (1, (64, 512), 100, [DECODE]),  # and a step cheaper than padding
        (40, (64, 512), 23, [DECODE] * 40),  # padding would pass the context's end
        (70, (64, 512), 0, [64, *[DECODE] * 6]),
        (3, (1, 64), 0, [1, 1, 1]),
    ],
)
def test_some_prompts(count, lengths, room, chunks):
    found = prompt_chunks(count, lengths, room)
    assert sorted(found) == sorted(chunks)


def test_random_prompts_are_read_whole_and_in_the_least_time(rng):
    for _ in range(300):
        count, room = int(rng.integers(1, 60)), int(rng.integers(0, 20))
        lengths = tuple(rng.choice([1, 2, 5, 8, 16, 31, 64], 2, replace=False).tolist())
        chunks = prompt_chunks(count, lengths, room)
        read = [length or 1 for length in chunks]
        # Only the last call may have padding, and one token of the prompt at least.
        assert sum(read[:-1]) < count <= sum(read) <= count + room
        assert sum(map(seconds, chunks)) == least(count, lengths, room)


def seconds(length):
    return 66 if length == DECODE else 32 + length


@functools.cache
def least(count, lengths, room):
    """By trying all ways."""
    if count <= 0:
        return 0
    ways = [seconds(n) + least(count - n, lengths, room) for n in lengths if n - count <= room]
    return min([*ways, seconds(DECODE) + least(count - 1, lengths, room)])

"""A prompt in calls of the lengths that a package takes.

Calls of any lengths make the same keys and values, so what is left to choose is the time: a call reads all
weights, however few its tokens are, and computes all its tokens, however many of them are padding.
"""

from __future__ import annotations

from collections.abc import Sequence

DECODE = 0
"""Stands for a call of `decode`, one token whose logits are thrown away."""

_CALL = 32
"""Tokens that take as long to compute as the weights take to read, roughly."""


def prompt_chunks(count: int, lengths: Sequence[int], room: int) -> list[int]:
    """Lengths of the calls that together take a prompt, in order.

    Only the last one may be longer than what is left of the prompt. The rest of it is padding: what it writes
    lies behind the prompt, where no token looks before another one has been written there.

    Args:
        count: tokens of the prompt.
        lengths: numbers of tokens that `prefill` takes.
        room: columns of the context behind the prompt, which padding may use.

    Returns:
        Each of `lengths`, or `DECODE`.
    """
    costs, first = [0], [DECODE]
    for left in range(1, count + 1):
        # A call of `decode` runs the reuse blocks and the head, too.
        options = [(2 * (_CALL + 1) + costs[left - 1], DECODE)]
        options += [
            (_CALL + length + costs[max(0, left - length)], length)
            for length in lengths
            if length - left <= room
        ]
        cost, length = min(options)
        costs.append(cost)
        first.append(length)
    chunks, left = [], count
    while left > 0:
        chunks.append(first[left])
        left -= first[left] or 1
    return chunks

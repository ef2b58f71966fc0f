"""The kernels against the reference over the embedded model, and rows of a batch against rows alone."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.loading.load import load

pytestmark = pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())


@pytest.fixture(scope="module")
def nano():
    return load()[0]


def seen(model, tokens):
    """The logits of tokens, (B, L, vocab_size), and the codes of their keys and values."""
    cache = [layer.merge([layer] * len(tokens)) for layer in model.make_cache()]
    logits = np.array(model(mx.array(tokens), cache))
    return logits, [np.array(layer.in_use()).astype(int) for layer in cache if not layer.empty()]


def test_a_rounding_turns_codes_by_one_step_and_these_turn_others(nano, rng):
    """Docs: where the kernels' logits part from the reference's by some 0.004 of the largest."""
    tokens = rng.integers(5, nano.args.vocab_size, (1, 24))
    got, codes = seen(nano, tokens)
    with dispatch.force("reference"):
        wanted, exact = seen(nano, tokens)
    steps = [np.abs(a - b) for a, b in zip(codes, exact, strict=True)]
    assert max(step.max() for step in steps) <= 1
    shares = [np.mean(step > 0) for step in steps]
    assert shares[0] < 0.005  # int16 activations of the first layer
    assert max(shares) < 0.1
    assert 0 < np.abs(got - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_row_has_the_same_bits_alone_and_in_company(nano, rng):
    tokens = rng.integers(5, nano.args.vocab_size, (18, 12))
    logits, codes = seen(nano, tokens)
    for row in (0, 7, 17):
        alone, of_row = seen(nano, tokens[row : row + 1])
        np.testing.assert_array_equal(logits[row], alone[0])
        for ours, theirs in zip(codes, of_row, strict=True):
            np.testing.assert_array_equal(ours[row], theirs[0])

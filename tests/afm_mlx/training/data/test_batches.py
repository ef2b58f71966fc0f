"""Batches: every sample once in an epoch, at its place in a row, the same for a seed and a step."""

from collections import Counter

import numpy as np
import pytest

from afm_mlx.errors import DataError
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.samples import Sample


def random_samples(rng, n, longest):
    """Samples of distinct tokens, so that a row's content tells where it is from; about half scored."""
    samples, token = [], 1
    for index in range(n):
        size = int(rng.integers(2, longest + 2))
        weights = rng.integers(0, 2, size) * rng.uniform(0.1, 2, size)
        weights[0], weights[-1] = 0, 1
        samples.append(Sample(list(range(token, token + size)), weights.tolist(), f"file:{index}"))
        token += size
    return samples


def unpack(batch):
    """The samples of a batch, without their last token's position: [(inputs, {input: (label, weight)})]."""
    inputs = np.array(batch.inputs)
    segments = np.array(batch.segments) if batch.segments is not None else (inputs > 0).astype(int)
    targets = [[] for _ in range(inputs.size)]
    for position, label, weight in zip(
        *map(np.array, (batch.positions, batch.labels, batch.weights)), strict=True
    ):
        if weight > 0:
            targets[position].append((int(label), float(weight)))
    found = []
    width = inputs.shape[1]
    for row in range(len(inputs)):
        for segment in range(1, segments[row].max(initial=0) + 1):
            columns = np.flatnonzero(segments[row] == segment)
            assert np.array_equal(columns, np.arange(columns[0], columns[-1] + 1))
            here = {int(inputs[row, c]): targets[row * width + c] for c in columns}
            found.append((inputs[row, columns].tolist(), {k: v for k, v in here.items() if v}))
    assert sum(map(len, targets)) == sum(len(t) for _, t in found)
    return found


def expected(sample):
    scored = {
        sample.tokens[i]: [(sample.tokens[i + 1], pytest.approx(sample.weights[i + 1]))]
        for i in range(len(sample.tokens) - 1)
        if sample.weights[i + 1] > 0
    }
    return sample.tokens[:-1], scored


def epoch(batches, number=0):
    steps = range(number * batches.per_epoch, (number + 1) * batches.per_epoch)
    return [batches(step) for step in steps]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_read_once_in_an_epoch(rng, packed, shuffle):
    for _ in range(8):
        length = int(rng.integers(8, 200))
        samples = random_samples(rng, int(rng.integers(1, 60)), length)
        batches = Batches(
            samples,
            batch_size=int(rng.integers(1, 6)),
            length=length,
            packed=packed,
            shuffle=shuffle,
            seed=int(rng.integers(1000)),
        )
        for number in (0, 1, 3):
            found = [entry for batch in epoch(batches, number) for entry in unpack(batch)]
            by_first = {inputs[0]: (inputs, targets) for inputs, targets in found}
            assert len(found) == len(by_first) == len(samples)
            for sample in samples:
                assert by_first[sample.tokens[0]] == expected(sample)


def test_shapes_of_packed_batches_are_the_same_in_an_epoch(rng):
    samples = random_samples(rng, 300, 90)
    # About 512 targets in a batch, so that they would fill up to 512 or to 768.
    batches = Batches(samples, batch_size=4, length=256, seed=1)
    for number in range(3):
        shapes = {tuple(array.shape for array in batch) for batch in epoch(batches, number)}
        assert len(shapes) == 1
        inputs, segments, positions, labels, weights = shapes.pop()
        assert inputs == segments == (4, 256)
        assert positions == labels == weights
        assert positions[0] % 256 == 0
    inputs, tokens = 256 * 4 * batches.per_epoch, sum(len(s.tokens) - 1 for s in samples)
    assert batches.fill == pytest.approx(tokens / inputs)
    assert batches.fill > 0.9


def test_unpacked_rows_lie_beside_rows_of_like_length(rng):
    samples = random_samples(rng, 200, 300)
    batches = Batches(samples, batch_size=4, length=300, packed=False)
    assert batches.per_epoch == 50
    padded = 0
    for batch in epoch(batches):
        assert batch.segments is None
        inputs = np.array(batch.inputs)
        lengths = (inputs > 0).sum(1)
        width = inputs.shape[1]
        assert width == min(-(-lengths.max() // 64) * 64, 300)
        # Padding is on the right, where no token sees it.
        assert all(row[:n].all() for row, n in zip(inputs, lengths, strict=True))
        padded += inputs.size - lengths.sum()
    assert batches.fill == pytest.approx(1 - padded / sum(b.inputs.size for b in epoch(batches)))
    assert batches.fill > 0.75  # about 0.55 if lengths were mixed


def as_lists(batch):
    return [None if array is None else array.tolist() for array in batch]


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_is_a_function_of_seed_and_step(rng, packed):
    samples = random_samples(rng, 50, 30)
    options = {"batch_size": 2, "length": 32, "packed": packed}
    first, second = (Batches(samples, **options, seed=5) for _ in range(2))
    steps = rng.permutation(3 * first.per_epoch).tolist()
    in_order = {step: as_lists(first(step)) for step in sorted(steps)}
    assert {step: as_lists(second(step)) for step in steps} == in_order
    other = Batches(samples, **options, seed=6)
    assert any(as_lists(other(step)) != in_order[step] for step in range(other.per_epoch))
    epochs = [
        Counter(str(in_order[n * first.per_epoch + i]) for i in range(first.per_epoch))
        for n in range(3)
    ]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("packed", [True, False])
def test_without_shuffle_epochs_are_alike(rng, packed):
    samples = random_samples(rng, 30, 30)
    options = {"batch_size": 2, "length": 32, "packed": packed, "shuffle": False}
    batches, other_seed = Batches(samples, **options), Batches(samples, **options, seed=9)
    for step in range(batches.per_epoch):
        assert as_lists(batches(step)) == as_lists(batches(step + batches.per_epoch))
        assert as_lists(batches(step)) == as_lists(other_seed(step))


def test_a_row_meets_other_samples_in_the_next_epoch(rng):
    samples = [Sample([10 * i + 1, 10 * i + 2, 10 * i + 3], [0, 1, 1], "f") for i in range(60)]
    batches = Batches(samples, batch_size=1, length=6)
    rows = [{frozenset(np.array(b.inputs)[0].tolist()) for b in epoch(batches, n)} for n in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 20
    assert len(rows[0] & rows[1]) < 10


def test_the_rows_that_the_last_batch_lacks_are_padding():
    samples = [Sample([5, 6, 7], [0, 0, 1], "f")] * 3
    for packed in (True, False):
        first, second = epoch(
            Batches(samples, batch_size=2, length=2, packed=packed, shuffle=False)
        )
        assert first.inputs.tolist() == [[5, 6], [5, 6]]
        assert second.inputs.tolist() == [[5, 6], [0, 0]]
        assert second.positions.tolist()[:3] == [1, 0, 0]
        assert second.labels.tolist()[:3] == [7, 0, 0]
        assert second.weights.tolist() == [1] + [0] * 255
    assert second.segments is None


def test_fingerprints_tell_data_apart(rng):
    samples = random_samples(rng, 20, 30)
    options = {"batch_size": 2, "length": 32, "seed": 1}
    fingerprint = Batches(samples, **options).fingerprint
    assert fingerprint == Batches(samples, **options).fingerprint
    for change in ({"seed": 2}, {"packed": False}, {"length": 40}, {"shuffle": False}):
        assert Batches(samples, **{**options, **change}).fingerprint != fingerprint
    changed = Sample(samples[3].tokens, [0, *samples[3].weights[1:-1], 0.5], "f")
    assert Batches([*samples[:3], changed, *samples[4:]], **options).fingerprint != fingerprint


def test_what_can_not_be_batched_is_named():
    good = Sample([1, 2], [0, 1], "a:1")
    cases = [
        ([], "no samples"),
        ([good, Sample([1, 2, 3, 4], [0, 1, 1, 1], "a:7")], "a:7: a sample of 4 tokens; rows take at most 3"),
        ([Sample([1], [0], "a:8"), good], "a:8: .*nothing is left to predict"),
        ([good, Sample([1, 2], [0, 0], "a:9")], "a:9: .*none of them has a weight"),
    ]  # fmt: skip
    for samples, message in cases:
        with pytest.raises(DataError, match=message):
            Batches(samples, batch_size=1, length=2)
    with pytest.raises(DataError, match="0 rows"):
        Batches([good], batch_size=0, length=2)

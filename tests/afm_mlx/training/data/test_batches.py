"""Batches: every sample once in an epoch, at its place in a row, the same for a seed and a step."""

import numpy as np
import pytest

from afm_mlx.errors import DataError
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.samples import Sample

both_ways = pytest.mark.parametrize("packed", [True, False])


def random_samples(rng, n, longest):
    """Samples of distinct tokens, so that a row's content tells where it is from; about half scored."""
    samples, token = [], 1
    for index in range(n):
        size = int(rng.integers(2, longest + 2))
        weights = rng.integers(0, 2, size) * rng.uniform(0.1, 2, size)
        weights[0], weights[-1] = 0, 1
        samples.append(Sample(list(range(token, token + size)), weights, f"file:{index}"))
        token += size
    return samples


def epoch(batches, number=0):
    steps = range(number * batches.per_epoch, (number + 1) * batches.per_epoch)
    return [batches(step) for step in steps]


def read(batches):
    """The runs of tokens that see each other; and of all targets, the token, the next one and the weight."""
    runs, targets = [], []
    for batch in batches:
        inputs, positions, labels, weights = (
            np.array(array) for array in (batch.inputs, *batch[2:5])
        )
        segments = np.array(inputs > 0 if batch.segments is None else batch.segments)
        for row, numbers in zip(inputs, segments, strict=True):
            runs += [row[numbers == number].tolist() for number in range(1, numbers.max() + 1)]
        scored = weights > 0
        tokens = inputs.reshape(-1)[positions[scored]]
        targets += zip(tokens, labels[scored], weights[scored], strict=True)
    return sorted(runs), sorted(targets)


def as_lists(batch):
    return [None if array is None else array.tolist() for array in batch]


@both_ways
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
        expected = [
            (token, token + 1, np.float32(weight))
            for sample in samples
            for token, weight in zip(sample.tokens[:-1], sample.weights[1:], strict=True)
            if weight > 0
        ]
        for number in (0, 1, 3):
            runs, targets = read(epoch(batches, number))
            assert runs == [sample.tokens[:-1] for sample in samples]
            assert targets == expected


def test_shapes_of_packed_batches_are_the_same_in_an_epoch(rng):
    samples = random_samples(rng, 300, 90)
    # About 512 targets in a batch, so that they would fill up to 512 or to 768.
    batches = Batches(samples, batch_size=4, length=256, seed=1)
    for number in range(3):
        (shapes,) = {tuple(array.shape for array in batch[:5]) for batch in epoch(batches, number)}
        inputs, segments, positions, labels, weights = shapes
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
    padded = total = 0
    for batch in epoch(batches):
        assert batch.segments is None
        inputs = np.array(batch.inputs)
        lengths = (inputs > 0).sum(1)
        assert inputs.shape[1] == min(-(-lengths.max() // 64) * 64, 300)
        # Padding is on the right, where no token sees it.
        assert all(row[:n].all() for row, n in zip(inputs, lengths, strict=True))
        padded, total = padded + inputs.size - lengths.sum(), total + inputs.size
    assert batches.fill == pytest.approx(1 - padded / total)
    assert batches.fill > 0.75  # about 0.55 if lengths were mixed


@both_ways
def test_a_batch_is_a_function_of_seed_and_step(rng, packed):
    samples = random_samples(rng, 50, 30)
    options = {"batch_size": 2, "length": 32, "packed": packed}
    first, second, other = (Batches(samples, **options, seed=seed) for seed in (5, 5, 6))
    epochs = [[as_lists(batch) for batch in epoch(first, number)] for number in range(3)]
    in_order = [*epochs[0], *epochs[1], *epochs[2]]
    for step in rng.permutation(len(in_order)).tolist():
        assert as_lists(second(step)) == in_order[step]
    assert [as_lists(batch) for batch in epoch(other)] != epochs[0]
    one, two, three = (sorted(map(str, batches)) for batches in epochs)
    assert one != two != three


@both_ways
def test_without_shuffle_all_epochs_and_seeds_are_alike(rng, packed):
    samples = random_samples(rng, 30, 30)
    first, *others = (
        [as_lists(batch) for batch in epoch(Batches(samples, **options, seed=seed), number)]
        for options in [{"batch_size": 2, "length": 32, "packed": packed, "shuffle": False}]
        for seed, number in ((0, 0), (0, 1), (9, 0))
    )
    assert others == [first, first]


def test_a_row_meets_other_samples_in_the_next_epoch():
    samples = [Sample([10 * i + 1, 10 * i + 2, 10 * i + 3], [0, 1, 1], "f") for i in range(60)]
    batches = Batches(samples, batch_size=1, length=6)
    rows = [{str(sorted(b.inputs[0].tolist())) for b in epoch(batches, n)} for n in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 20
    assert len(rows[0] & rows[1]) < 10


@both_ways
def test_the_rows_that_the_last_batch_lacks_are_padding(packed):
    samples = [Sample([5, 6, 7], [0, 0, 1], "f")] * 3
    first, second = epoch(Batches(samples, batch_size=2, length=2, packed=packed, shuffle=False))
    assert first.inputs.tolist() == [[5, 6], [5, 6]]
    assert second.inputs.tolist() == [[5, 6], [0, 0]]
    for array, value in ((second.positions, 1), (second.labels, 7), (second.weights, 1)):
        assert array.tolist() == [value] + [0] * 255


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
    good, too_long = Sample([1, 2], [0, 1], "a:1"), Sample([1, 2, 3, 4], [0, 1, 1, 1], "a:7")
    for samples, batch_size, message in (
        ([], 1, "no samples"),
        ([good, too_long], 1, "a:7: a sample of 4 tokens; rows take at most 3"),
        ([Sample([1], [0], "a:8"), good], 1, "a:8: .*nothing is left to predict"),
        ([good, Sample([1, 2], [0, 0], "a:9")], 1, "a:9: .*none of them has a weight"),
        ([good], 0, "0 rows"),
    ):
        with pytest.raises(DataError, match=message):
            Batches(samples, batch_size=batch_size, length=2)

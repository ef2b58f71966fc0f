"""Tables of k-means against the best that there are."""

import numpy as np

from afm_mlx.quantization.grids import k_means, nearest_entries
from tests.tools.cases import all_pairs


def least_error(weights, entries):
    """Squared error of the best table: dynamic programming over where clusters of sorted weights end."""
    ordered = np.sort(weights.astype(np.float64))
    sums, squares = (np.concatenate([[0], np.cumsum(ordered**p)]) for p in (1, 2))
    place = np.arange(len(ordered) + 1)
    count = place - place[:, None]
    spread = np.subtract.outer(sums, sums).T ** 2 / np.maximum(count, 1)
    cost = np.where(count > 0, np.subtract.outer(squares, squares).T - spread, np.inf)
    least = cost[0]
    for _ in range(entries - 1):
        least = (least[:, None] + cost).min(axis=0)
    return least[-1]


def test_a_table_is_near_the_best_there_is(rng):
    for kind, entries in all_pairs(["normal", "heavy tails", "two heaps", "an outlier"], [4, 16]):
        weights = {
            "normal": rng.normal(0, 0.02, (4, 300)),
            "heavy tails": rng.standard_t(3, (4, 300)),
            "two heaps": rng.normal(0, 0.1, (4, 300)) + rng.choice([-1, 1], (4, 300)),
            "an outlier": np.where(np.arange(300) == 7, 1e3, rng.normal(0, 1, (4, 300))),
        }[kind].astype(np.float32)
        tables, exact = k_means(weights, entries)
        assert not exact.any()
        assert (np.diff(tables, axis=1) >= 0).all()
        codes = nearest_entries(weights, tables)
        errors = np.square(np.take_along_axis(tables, codes.astype(int), 1) - weights).sum(axis=1)
        # A far outlier leaves most of the bins empty.
        factor = 2.0 if kind == "an outlier" else 1.06
        for got, line in zip(errors, weights, strict=True):
            assert got <= factor * least_error(line, entries)

"""The benchmark of task masks, on the small preset: all figures are there, and targets are judged by them."""

import json

import pytest

from bench import masks


def test_every_figure_is_measured(tmp_path, capsys):
    argv = ["--preset", "afm-nano", "--rounds", "1", "--steps", "3"]
    masks.main([*argv, "--output", str(tmp_path)])
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "masks.json").read_text())
    found = figures["decoding"]
    assert {float(share) for share in found["step_seconds"]} == set(masks.SHARES)
    assert all(len(steps) == 3 for steps in found["step_seconds"].values())
    whole, half, quarter = found["bytes"].values()
    assert whole - half == pytest.approx(2 * (half - quarter), rel=0.02)
    assert figures["swaps"]["swap_seconds"]
    assert printed.count("at least 0.9 x") == 2
    assert "later swap, in the pool" in printed


def test_a_target_compares_the_gain_with_the_bytes():
    figures = {
        "decoding": {
            "step_seconds": {1.0: [3.0, 6.0, 3.0], 0.5: [2.0, 4.0, 9.0], 0.25: [2.0, 3.0, 1.5]},
            "bytes": {1.0: 300, 0.5: 200, 0.25: 150},
        },
        "swaps": {"first_seconds": [0.3, 0.1, 0.15], "swap_seconds": [1e-4]},
    }
    half, quarter, first, later = masks.targets(figures)
    assert (half.value, half.met) == (pytest.approx(1.0), True)
    assert (quarter.value, quarter.met) == (pytest.approx(1.0), True)
    assert (first.value, first.met) == (pytest.approx(150), True)
    assert (later.value, later.met) == (pytest.approx(0.1), True)

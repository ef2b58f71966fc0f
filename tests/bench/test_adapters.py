"""The benchmark of adapters, on the small preset: all figures are there, and targets are judged by them."""

import io
import json
import re

import mlx.core as mx
import pytest

from afm_mlx.adapters.active import active_adapters
from afm_mlx.config import PRESETS
from afm_mlx.measure.random_model import random_packed_model
from bench import adapters

pytestmark = pytest.mark.xdist_group("bench.adapters")  # it is measured once


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What it prints, and its file."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *parts, **_: lines.append(" ".join(map(str, parts))))
        argv = ["--preset", "afm-nano", "--rounds", "1", "--generated", "4"]
        adapters.main([*argv, "--output", str(folder)])
    return "\n".join(lines), json.loads((folder / "adapters.json").read_text())


def test_every_figure_is_measured(measured):
    printed, figures = measured
    assert set(figures["decoding"]) == {
        "1 row, none",
        "1 row, rank 16",
        "8 rows, none",
        "8 rows, 1 adapter",
        "8 rows, 8 adapters",
    }
    assert all(len(rates) == 1 and rates[0] > 0 for rates in figures["decoding"].values())
    assert set(figures["prompts"]) == {"none", "rank 16"}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in figures["prompts"].values())
    for found in figures["swaps"].values():
        assert all(found[f"{name}_seconds"] > 0 for name in ("swap", "kept", "after_swap"))
        assert len(found["first_ever_seconds"]) == 2
    assert len(figures["loads"]["load_seconds"]) == 1
    # Rank 32 of every pair of the preset, in float16.
    assert figures["loads"]["bytes"] > 2_000_000
    counts = figures["operations"]
    assert counts["none"] <= counts["rank 16"] <= counts["8 rows, 8 ranks"]
    for name in (
        "8 rows, 8 adapters",
        "prompt of 512, rank 16",
        "swap of a resident adapter",
        "operations a step",
    ):
        assert name in printed


def test_targets_are_judged_by_the_figures(measured):
    _, figures = measured
    slow = {name: [10.0] for name in figures["decoding"]} | {"1 row, rank 16": [8.0]}
    judged = {t.name: t.met for t in adapters.targets(figures | {"decoding": slow})}
    assert judged["decode with rank 16, over none"] is False
    assert judged["8 rows with 8 adapters, over with one"] is True
    quick = figures | {"prompts": {"none": [100.0, 50.0, 100.0], "rank 16": [93.0, 40.0, 93.0]}}
    (prompt,) = [t for t in adapters.targets(quick) if t.name == "prompt with rank 16, over none"]
    assert prompt.value == pytest.approx(0.93)
    assert prompt.met is True
    late = figures["loads"] | {"load_seconds": [0.1, 0.2, 0.3]}
    (load,) = [t for t in adapters.targets(figures | {"loads": late}) if "first load" in t.name]
    assert load.value == pytest.approx(200)
    assert load.met is False


def test_the_first_step_with_an_adapter_computes_that_step_alone(monkeypatch):
    """The prompt was once computed with it, half a second at the 3B's size, and counted as the adapter's."""
    model, operations = random_packed_model(PRESETS["afm-nano"]), []
    greedy = model.greedy

    def counted(tokens, cache):
        found = greedy(tokens, cache)
        drawing = io.StringIO()
        mx.export_to_dot(drawing, found[0])
        count = len(re.findall(r'\[label ="', drawing.getvalue()))
        operations.append((active_adapters(model).batch is not None, count))
        return found

    monkeypatch.setattr(model, "greedy", counted, raising=False)
    adapters.swaps(model, (16, 16), 2)
    adapted = [count for with_adapter, count in operations if with_adapter]
    assert len(adapted) == 6
    assert len(set(adapted)) == 1
    assert operations[0][1] > adapted[0]  # the prompt's

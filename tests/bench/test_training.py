"""The benchmark of training steps: its arithmetic by hand, and all of it on a small model."""

import json

import pytest

from afm_mlx.config import PRESETS
from afm_mlx.training.methods.training_memory import estimate_memory
from bench import training
from tests.tools.models import random_config


def answer(seconds, peak):
    return {
        "seconds": [seconds, seconds * 3, seconds * 2],
        "processor_seconds": [seconds * 2] * 3,
        "peak_bytes": peak,
        "held_bytes": peak // 2,
    }


def test_ratios_are_of_processor_time_and_medians(rng):
    config = random_config(rng)
    found = training.cases(2, 64)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    answers = {"full": [answer(1.0, 1000)], "qat per tensor": [answer(1.25, 2000)] * 2}
    figures = training.summary(config, found, answers)
    assert list(figures) == ["full", "qat per tensor"]
    assert figures["full"]["seconds"] == 2.0
    assert figures["full"]["tokens_per_second"] == 64.0
    assert figures["qat per tensor"]["peak_bytes"] == 2000
    targets = {t.name: t for t in training.targets(figures)}
    assert targets["qat per tensor over full"].value == pytest.approx(1.25)
    assert targets["qat per tensor over full"].met
    assert targets["qat per row over full"].met is None
    rows = training.table(figures)
    assert [row[0] for row in rows[1:]] == ["full", "qat per tensor"]
    assert rows[2][3] == "1.25"


def test_what_fits_into_which_mac():
    rows = training.mac_rows(training.PRESETS["afm-3b"])
    assert rows[0][-1] == f"{training.MAC_GIGABYTES[-1]} GB"
    for row in rows[1:]:
        lengths = [0 if cell == "no" else int(cell.split()[0].replace(",", "")) for cell in row[2:]]
        assert lengths == sorted(lengths)
    packed = next(row for row in rows if row[0] == "LoRA, 2-bit base, recomputed")
    assert packed[2] != "no"  # into 16 GB


def test_the_largest_length_fits_and_the_next_does_not(rng):
    config = PRESETS["afm-3b"]
    settings = {"batch_size": int(rng.integers(1, 4)), "base_bits": 2, "grad_checkpoint": True}
    low = estimate_memory(config, "lora", length=64, **settings).total
    budget = int(low * rng.uniform(1.05, 1.3))
    length = training.largest_length(config, budget, "lora", **settings)
    assert 64 <= length < config.context_length
    assert estimate_memory(config, "lora", length=length, **settings).total <= budget
    assert estimate_memory(config, "lora", length=length + 64, **settings).total > budget
    assert training.largest_length(config, low - 1, "lora", **settings) == 0


@pytest.mark.slow
def test_the_whole_benchmark_on_a_small_model(rng, tmp_path, monkeypatch, capsys):
    sizes = {"hidden_dim": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    config = random_config(rng, **sizes, num_kv_reuse_layers=1)
    monkeypatch.setitem(training.PRESETS, "afm-3b", config)
    sizes = ["--depth", "2", "--vocabulary", "64", "--length", "64", "--batch-size", "1"]
    only = ["--only", "full", "lora, 2-bit", "mlx-lm full"]
    training.main([*sizes, "--steps", "1", "--rounds", "1", *only, "--output", str(tmp_path)])
    facts = json.loads((tmp_path / "training.json").read_text())
    out = capsys.readouterr().out
    for name in ("full", "lora, 2-bit base", "mlx-lm full"):
        assert facts["figures"][name]["peak_bytes"] > 0
        assert name in out

"""Targets are judged by the medians, and tables show every peer and target."""

import pytest

from bench.peer_afm import afm_model
from bench.peer_figures import afm_targets, table, zoo_targets
from bench.peer_models import EXACT, INT8, MLX_LM
from bench.targets import Target, markdown, target_rows


def test_targets_compare_with_the_best_of_llama():
    memory = {"peak_memory": 115.0, "peak_resident": 130.0, "weight": 90.0, "cache": 10.0}
    medians = {
        EXACT: {"decode": 10.0, "batch": 45.0, "deep": 7.0, "load_seconds": 1.6},
        INT8: {"decode": 20.0, "prefill": 190.0, "decode_bytes_per_step": 9e8},
        "llama.cpp A": {"decode": 8.0, "prefill": 50.0},
        "llama.cpp B": {"decode": 5.0, "prefill": 100.0},
    }
    medians[EXACT] |= {f"memory_{name}_bytes": value for name, value in memory.items()}
    found = {t.name: (t.value, t.met) for t in afm_targets(medians, limit=30e9)}
    for name, value, met in (
        (f"{EXACT}: decode over llama.cpp's best", 1.25, True),
        (f"{EXACT}: batch over one row", 4.5, True),
        (f"{EXACT}: decode deep in the context", 0.7, False),
        (f"{EXACT}: decode over mlx-lm", None, None),
        (f"{INT8}: prefill over llama.cpp's best", 1.9, False),
        (f"{INT8}: share of the measured bandwidth", 0.6, True),
        ("peak memory over weights and cache", 1.15, True),
        ("the whole process's, likewise", 1.3, False),
        ("loading from the page cache", 1.6, False),
    ):
        assert found[name] == (pytest.approx(value), met), name


def test_a_model_that_all_run_is_to_be_no_slower():
    medians = {
        EXACT: {"decode": 9.0, "prefill": 50.0},
        MLX_LM: {"decode": 0.5},
        "llama.cpp A": {"decode": 8.0, "prefill": 50.0, "batch": 20.0},
        "llama.cpp B": {"decode": 10.0},
    }
    found = {t.name: (t.value, t.met) for t in zoo_targets(medians, limit=30e9)}
    for figure, value, met in (
        ("decode", 0.9, False),
        ("prefill", 1.0, True),
        ("batch", None, None),
    ):
        assert found[f"{EXACT}: {figure} over llama.cpp's best"] == (value, met)
    assert found[f"{EXACT}: decode over mlx-lm"] == (18, True)
    assert found[f"{INT8}: decode over mlx-lm"] == (None, None)


def test_tables_show_every_peer_and_every_target():
    medians = {
        EXACT: {"weight_bytes": 1e9, "decode": 20.0, "decode_bytes_per_step": 2e9, "prefill": 10.0},
        "llama.cpp A": {"weight_bytes": 3e9, "decode": 2.0, "load_seconds": float("nan")},
    }
    model = afm_model("afm-nano")
    rows = table(medians, model)
    assert {len(row) for row in rows} == {9}
    columns = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert columns[EXACT]["decode GB/s"] == "40.00"
    assert columns[EXACT]["deep tok/s"] == "-"
    rate = 10 * 2 * model.prompt_weights(EXACT)
    assert columns[EXACT]["prefill GFLOP/s"] == f"{rate / 1e9:.1f}"
    assert columns["llama.cpp A"]["decode GB/s"] == "6.00"
    assert columns["llama.cpp A"]["load s"] == "-"
    verdicts = [Target("a", 2.0, 1.5), Target("b", 2.0, 1.5, True, "s"), Target("c", None, 1)]
    assert [row[-1] for row in target_rows(verdicts)[1:]] == ["met", "missed", "not measured"]
    lines = markdown(target_rows(verdicts)).splitlines()
    assert len({len(line) for line in lines}) == 1

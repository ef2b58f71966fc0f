"""The example that trains parallel tracks: how both models begin, and the measured figures."""

import argparse
import dataclasses
import importlib.util
import json
import sys

import mlx.core as mx
import pytest

from afm_mlx.loading.load import load
from tests.examples.conftest import EXAMPLES
from tests.tools.compare import assert_close


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "pt_moe" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    yield example("train")
    for name in ("train", "prune"):
        sys.modules.pop(name, None)


def test_both_models_begin_as_the_identity_and_are_measured(script, tmp_path):
    active, dense = script.TRACKS.num_active_parameters, script.DENSE.num_parameters
    assert active == pytest.approx(dense, rel=0.01)
    for name in (*script.NAMES, "pt-moe-4bit"):
        script.write_random_model(name.removesuffix("-4bit"), tmp_path / name, seed=0)
    model, _ = load(tmp_path / "pt-moe")
    tokens, body = mx.array([[5, 6, 7]]), model.model
    unchanged = body.embed_tokens.as_linear(body.norm(body.embed_tokens(tokens)))
    assert_close(model(tokens), unchanged, 1e-5)
    (tmp_path / "pt-moe-run").mkdir()
    lines = [{"valid_load_entropy": 0.5}, {"valid_load_entropy": 0.75}, {"train_loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "pt-moe-run" / "metrics.jsonl").write_text(text)
    report = script.measure(argparse.Namespace(out=tmp_path, limit=1))
    assert report["load_entropy"] == 0.75
    for figure in ("accuracy", "nats"):
        assert report[figure].keys() == {"pt-moe", "dense", "pt-moe-4bit"}
        assert {len(each) for each in report[figure].values()} == {7 + 1}  # tasks and their mean
    assert 6 < report["nats"]["pt-moe"]["mean of known tasks"] < 10  # ln 4096 is 8.3


def test_experts_are_removed_in_rounds_with_training(script, tmp_path, monkeypatch):
    prune = example("prune")
    small = dataclasses.replace(script.TRACKS, num_tracks=2, num_layers_per_track=4)
    monkeypatch.setattr(script, "TRACKS", small)
    script.write_random_model("pt-moe", tmp_path / "pt-moe", seed=0)
    args = argparse.Namespace(
        out=tmp_path, seed=0, steps=4, rows=1, texts=2, learning_rate=1e-3, limit=1
    )
    lines = script.draw_lines([], 1, 8, 2)
    monkeypatch.setattr(script, "draw_lines", lambda *args: lines)  # fewer for validation
    script.write_data(tmp_path / "data", 8, 0)
    found = {name: prune.prune(name, prune.HALF[name], args) for name in ("random", "lottery")}
    assert [each["experts"] for each in found.values()] == [[8, 4], [8, 4]]
    assert found["lottery"]["perplexity"][1] < found["random"]["perplexity"][1]  # it was trained
    assert (len(found["random"]["load_entropy"]), len(found["lottery"]["load_entropy"])) == (0, 8)
    assert prune.prune("lottery", prune.HALF["lottery"], args) == found["lottery"]
    figures = script.measure_folders({"lottery": tmp_path / "lottery"}, 1)
    assert len(figures["accuracy"]["lottery"]) == 7 + 1

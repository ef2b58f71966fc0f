"""The example that trains parallel tracks: how both models begin, and the measured figures."""

import argparse
import importlib.util
import json

import mlx.core as mx
import pytest

from afm_mlx.loading.load import load
from tests.examples.conftest import EXAMPLES
from tests.tools.compare import assert_close


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pt_moe_train", EXAMPLES / "pt_moe" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

"""The script of Instruction-Following Pruning: how the wide model and its masks begin."""

from __future__ import annotations

import argparse
import sys

import mlx.core as mx
import numpy as np
import pytest

import afm_mlx
from afm_mlx.loading.load import load_predictor
from afm_mlx.training.loop.masked_loss import add_masks, masked
from tests.examples.conftest import EXAMPLES
from tests.tools.compare import assert_close

sys.path.insert(0, str(EXAMPLES / "masks"))
import docstrings
import ifp


@pytest.fixture
def args(tmp_path) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path, steps=2, rows=1, seed=0, chunk=64, soft=False, temperature=1.0
    )


def test_the_wide_model_begins_as_the_dense_one(tmp_path, args, monkeypatch):
    monkeypatch.setattr(ifp, "PROMPTS_OF_START", 8)
    few = docstrings.Texts(docstrings=["Return the sum of two numbers."] * 9)
    monkeypatch.setattr(docstrings, "gather", lambda: few)
    ifp.write_data(args)
    for name in ("dense", "ifp"):
        ifp.write_start(tmp_path / name, name, args)
    (dense, tokenizer), (wide, _) = (afm_mlx.load(tmp_path / name) for name in ("dense", "ifp"))
    assert wide.args.ffn_dim == ifp.WIDER * dense.args.ffn_dim
    tokens = mx.array([[5, 6, 7, 8]])
    expected = dense(tokens)
    assert_close(wide(tokens), expected, 1e-4)
    predictor = load_predictor(tmp_path / "ifp", wide.args)
    groups = predictor.config.groups // ifp.WIDER
    assert predictor.config.kept_groups == groups
    first = mx.arange(predictor.config.groups) < groups
    add_masks(wide)
    mask = mx.broadcast_to(first, (1, wide.args.num_layers, predictor.config.groups))
    with masked(wide, mask.astype(mx.float32), mx.zeros(tokens.shape, mx.int32)):
        assert_close(wide(tokens), expected, 1e-4)
    scores = ifp.prompt_scores(predictor, tokenizer, 0)
    masks = np.array(mx.stack([predictor.masks(each) for each in scores.values()]))
    assert 0.02 < masks[..., groups:].sum() / masks.sum() < 0.6
    assert len({mask.tobytes() for mask in masks}) == len(masks)

"""The benchmark of parallel tracks, on small models: both have as many weights, and all figures are there."""

import dataclasses
import json

from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from bench import pt_moe


def test_every_figure_is_measured(tmp_path, capsys, monkeypatch):
    small = {"vocab_size": 64, "num_experts": 4, "attention_hidden_dim": 64}
    small |= {"dense_feed_forward_hidden_dim": 64, "sparse_feed_forward_hidden_dim": 64}
    monkeypatch.setattr(pt_moe, "TRACKS", dataclasses.replace(pt_moe.TRACKS, **small))
    argv = ["--hidden", "64", "--prompt", "32", "--steps", "34", "--rounds", "1"]
    pt_moe.main([*argv, "--output", str(tmp_path)])
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "pt_moe.json").read_text())
    for seconds in found["seconds"].values():
        assert {name: len(each) for name, each in seconds.items()} == {
            "prefill": 1,
            "decode": 34,
        }  # more steps than tokens
    assert printed.count("at least 1.2 x") == 2


def test_both_models_have_as_many_weights():
    tracks = dataclasses.replace(pt_moe.TRACKS, vocab_size=64, hidden_dim=64)
    args = qwen3_moe.ModelArgs.from_dict(pt_moe.qwen3_values(tracks))
    count = sum(array.size for _, array in tree_flatten(qwen3_moe.Model(args).parameters()))
    # Its router sees the experts of all tracks, once; its norms are of one track.
    assert abs(count / tracks.num_parameters - 1) < 0.002

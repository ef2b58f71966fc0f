"""The benchmark of the image encoder, on a tiny one: all figures are there, and targets are judged by them."""

import json

from afm_mlx.config import PRESETS
from bench import vision
from tests.tools.vision import with_images


def test_every_figure_is_measured(tmp_path, capsys, monkeypatch):
    config = with_images(PRESETS["afm-nano"], hidden_dim=32, num_heads=2)
    monkeypatch.setitem(PRESETS, "afm-3b-vision", config)
    vision.main(["--rounds", "2", "--modes", "high", "rapid", "--output", str(tmp_path)])
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "vision.json").read_text())
    assert set(figures["passes"]) == {"high", "rapid"}
    for passes in figures["passes"].values():
        assert set(passes) == {vision.PEER, *vision.OURS}
        assert all(len(each) == 2 for each in passes.values())
    assert printed.count("at least 1.5 x") == 2 * len(vision.OURS)


def test_a_target_compares_neighbouring_runs():
    passes = {name: [(2.0, 4.0), (4.0, 4.0), (3.0, 4.0)] for name in vision.OURS}
    figures = {"rapid": {vision.PEER: [(3.0, 8.0), (8.0, 8.0), (3.0, 8.0)], **passes}}
    found = vision.targets(figures)
    assert {(target.value, target.met) for target in found} == {(1.5, True)}
    assert vision.ratio(figures["rapid"], vision.OURS[0], 1) == 2

"""The picture of a run."""

import json
import sys

import pytest

from afm_mlx.errors import AFMError, DataError
from afm_mlx.training.loop.run_folder import plot_metrics


def test_a_png_is_written(tmp_path, rng):
    pytest.importorskip("matplotlib")
    import matplotlib.image

    records = [
        {"step": 0, "valid_loss": 3.0, "valid_perplexity": 20.1},
        *({"step": s, "loss": 3 - s / 50, "learning_rate": 1e-3 / s} for s in range(10, 60, 10)),
        {"step": 50, "valid_loss": 2.1, "valid_perplexity": None},
    ]
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    pictures = []
    for count in (2, len(records)):
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records[:count]))
        plot_metrics(metrics, png)
        pictures.append(matplotlib.image.imread(png))
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] != pictures[1]).any()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [None, "", '{"step": 1}\n'])
def test_nothing_to_draw(tmp_path, content):
    pytest.importorskip("matplotlib")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AFMError, match=r"pip install .*\[train\]"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "a.png")

"""Where models come from: draft models of random weights."""

import json

import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import AFMError
from afm_mlx.training.methods.model_source import FreshSource
from tests.tools.compare import changed


@pytest.mark.usefixtures("draft_preset")
def test_a_fresh_draft_model_has_a_presets_sizes_and_its_targets_vocabulary(model):
    fresh, again, other = (FreshSource.for_target(model, "tiny-draft", seed) for seed in (1, 1, 2))
    drawn = [dict(tree_flatten(source.load().parameters())) for source in (fresh, again, other)]
    assert not changed(drawn[0], drawn[1])
    assert "model.embedding.weight" in changed(drawn[0], drawn[2])
    assert (fresh.values["kv_bits"], fresh.values["num_layers"]) == (None, 1)
    target = json.loads((model / "config.json").read_text())
    for name in ("vocab_size", "context_length"):
        assert fresh.values[name] == target[name]


def test_a_fresh_draft_model_needs_sizes_and_an_afm_target(model, tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    for target, preset, message in (
        (model, "huge", r"no preset 'huge'.*allowed are .*afm-3b-draft"),
        (tmp_path / "llama", "afm-3b-draft", "The teacher: .* is no AFM model"),
        (tmp_path / "nowhere", "afm-3b-draft", "The teacher: There is no folder"),
    ):
        with pytest.raises(AFMError, match=message):
            FreshSource.for_target(target, preset)

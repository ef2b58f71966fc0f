"""A bundle compared with MLX, by Apple's runtime."""

import shutil

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.coreai import CoreAIModel
from afm_mlx.errors import AFMError
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure import coreai_report as coreai
from tests.tools.coreai import ADAPTER


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(coreai, "in_own_process", lambda function, *arguments: function(*arguments))


def test_an_examination(core_ai, here, monkeypatch):
    counts = []
    facts = coreai.examine_coreai(
        core_ai.bundle,
        core_ai.folder,
        adapter=ADAPTER,
        seed=3,
        progress=lambda *count: counts.append(count),
    )
    mlx, bundle = facts["runs"]
    assert (facts["ok"], facts["not_run"], facts["failures"]) == (True, None, {})
    assert counts == [(1, 2), (2, 2)]
    assert bundle["error"] < 1e-5
    assert bundle["same_tokens"] == bundle["steps"] == 20
    assert min(mlx["decode_tokens_per_second"], bundle["prefill_tokens_per_second"]) > 0
    assert facts["packages"]["tiny"]["prompt_lengths"] == [4, 12]
    # A bundle that forgets the adapter is found.
    monkeypatch.setattr(coreai, "CoreAIModel", lambda path, adapter: CoreAIModel(path))
    found = coreai.examine_coreai(core_ai.bundle, core_ai.folder, adapter=ADAPTER, quick=True)
    assert "of their size away from MLX's" in found["failures"]["tiny"]


def test_what_ends_the_process_is_a_failure(core_ai, monkeypatch):
    monkeypatch.setattr(coreai, "in_own_process", ended)
    found = coreai.examine_coreai(core_ai.bundle, core_ai.folder, quick=True)
    assert found["failures"] == {"tiny": "it has ended"}


def ended(*arguments):
    raise AFMError("it has ended")


def test_another_model(core_ai, tmp_path):
    folder = shutil.copytree(core_ai.folder, tmp_path / "other")
    weights = {name: np.array(array) for name, array in load_weights(folder).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = 2 * weights[name]
    save_weights(folder, {name: mx.array(array) for name, array in weights.items()})
    with pytest.raises(AFMError, match="was made from other weights than"):
        coreai.examine_coreai(core_ai.bundle, folder)
    with pytest.raises(AFMError, match="was made from another model than"):
        coreai.examine_coreai(core_ai.bundle, resolve_model("afm-nano"))


def test_without_coreai_core(core_ai, monkeypatch):
    monkeypatch.setattr(coreai, "obstacle", lambda: "it is missing")
    for path in (None, core_ai.bundle):
        found = coreai.examine_coreai(path, core_ai.folder)
        assert (found["not_run"], found["runs"], found["ok"]) == ("it is missing", [], True)

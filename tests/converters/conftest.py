"""Small checkpoints, made by tamm as the toolkit's are, with random weights."""

import functools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tamm.adapters import LoRAModelAdapter
from tamm.ao.arch_optimizers import KVQuantArchOptimizer
from tamm.models.afm_text import AFMTextV7
from tamm.utils import json as tamm_json

from afm_mlx.checkpoint import weights
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.errors import AFMError
from afm_mlx.tokenizer import tokenizer_export
from tests.tools import exports
from tests.tools.compare import assert_same_tensors
from tests.tools.tokenizers import train_tiny_spm

SMALL = {"vocab_size": 512, "hidden_dim": 64, "num_layers": 5, "num_kv_reuse_layers": 2}
SMALL |= {"num_heads": 4, "num_kv_heads": 2}
# The toolkit's draft model has no reuse, no KV quantizer and another feed-forward width.
DRAFT = SMALL | {"num_kv_reuse_layers": 0, "num_layers": 3, "hidden_dim_scale_factor": 3.0}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, **changes):
    values = {k: v for k, v in (config_of(folder) | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(values))


def assert_same_weights(one, other):
    assert_same_tensors(load_weights(one), load_weights(other))


@pytest.fixture(scope="session")
def tokenizer_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    return train_tiny_spm(path, "bpe", vocab_size=500).read_bytes()


_agreeing = set()  # what a SentencePiece model became as tokenizer.json, where the two agree


@pytest.fixture(scope="module", autouse=True)
def _tokenizers_compared_once():
    """Thousands of texts are compared for each model once: it takes longer than the rest of a conversion."""
    compare = tokenizer_export._compare

    def compared(vocabulary, hub, path):
        model = (path.read_bytes(), hub.tokenizer.to_str())
        if model in _agreeing:
            return True, []
        found = compare(vocabulary, hub, path)
        if found == (True, []):
            _agreeing.add(model)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_export, "_compare", compared)
        yield


def randomize(model, rng):
    """Weights of a trained model's size; norms and the adapters' second halves away from 1 and 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if "norm" in name:
                values = rng.uniform(0.5, 1.5, shape)
            else:
                fan_in = shape[0] if name.endswith("_transpose") else shape[-1]
                values = rng.normal(0, fan_in**-0.5, shape)
            if name.endswith("_transpose"):  # adapters run in float16
                values = values.astype(np.float16)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


@pytest.fixture
def make_checkpoint(tmp_path, rng, tokenizer_bytes):
    def make(name="base-model", folder="assets", shape=SMALL, kv_quant=True, adapters=None):
        config = AFMTextV7.Config(
            **shape,
            adapters={k: LoRAModelAdapter(**v) for k, v in (adapters or {}).items()} or None,
            arch_optimizers={"kv_quant": KVQuantArchOptimizer()} if kv_quant else None,
        )
        model = config.create_model()
        randomize(model, rng)
        if kv_quant:
            model.train()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.from_numpy(rng.integers(1, shape["vocab_size"], (2, 16))))
        model.eval()
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        archive, config_path = path / f"{name}.pt", path / f"{name}-config.json"
        torch.save(model.state_dict(), archive)
        config_path.write_text(tamm_json.dumps(config))
        (path / "tokenizer.model").write_bytes(tokenizer_bytes)
        found = {"folder": path, "weights": archive, "config_path": config_path}
        return SimpleNamespace(**found, config=config, model=model, shape=shape)

    return make


@pytest.fixture
def edit_state():
    def edit(checkpoint, change):
        state = torch.load(checkpoint.weights, weights_only=True)
        changed = change(state)
        torch.save(changed if isinstance(changed, dict) else state, checkpoint.weights)

    return edit


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def listing(folder):
    """A folder with all below it: what a failure must leave as it was."""
    return sorted(folder.rglob("*"))


def assert_failures_leave_nothing(make, path, monkeypatch):
    """`make` writes `path`: an interrupt, a disk without room, or a folder that is there change nothing."""
    before = listing(path.parent)

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(path, progress=interrupt)
    usage = shutil.disk_usage(path.parent)._replace(free=10_000)
    with monkeypatch.context() as patch, pytest.raises(AFMError, match="has no room"):
        patch.setattr(weights.shutil, "disk_usage", lambda path: usage)
        make(path)
    assert listing(path.parent) == before
    path.mkdir()
    with pytest.raises(AFMError, match="exists already"):
        make(path)
    assert [*path.iterdir()] == []


@pytest.fixture
def write_model(rng, tmp_path):
    """Write a model with random weights to export, see `exports.write_model`; return its folder."""
    return functools.partial(exports.write_model, tmp_path / "model", rng)

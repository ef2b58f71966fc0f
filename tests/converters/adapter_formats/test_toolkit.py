"""The toolkit's `.pt` files: tamm loads what is written, and computes what this package computes with it."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from tamm.adapters import LoRAModelAdapter
from tamm.ao.arch_optimizers import KVQuantArchOptimizer
from tamm.models.afm_text import AFMTextV7
from tamm.utils import json as tamm_json

from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.converters import convert
from afm_mlx.converters.adapter_formats import read_adapter, write_adapter
from afm_mlx.converters.adapter_formats.pair_order import pair_places
from afm_mlx.converters.toolkit_keys import adapter_key
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.loading import load_model
from tests.converters.adapter_formats.conftest import equal
from tests.converters.conftest import DRAFT, SMALL


@pytest.mark.parametrize("shape", [SMALL, DRAFT], ids=["reuse", "no reuse"])
def test_tamm_computes_what_this_package_computes(
    shape, make_checkpoint, draw_adapter, rng, tmp_path
):
    checkpoint = make_checkpoint(shape=shape, kv_quant=False)
    base = convert(checkpoint.folder, tmp_path / "base")
    model_config = ModelConfig.from_file(base / "config.json")
    rank, scale = int(rng.integers(1, 20)), float(rng.uniform(0.2, 1.5))
    tensors, config = draw_adapter(model_config, rank, scale, fingerprint=None)
    write_adapter(tmp_path / "a", tensors, config, "mlx-lm")
    write_adapter(tmp_path / "a.pt", tensors, config, "toolkit", model_config=model_config)

    # Both files go through tamm's own readers.
    theirs = tamm_json.loads((tmp_path / "a-config.json").read_text()).create_model()
    base_state = {
        key if key in theirs.state_dict() else _wrapped(key): tensor
        for key, tensor in checkpoint.model.state_dict().items()
    }
    adapter_state = torch.load(tmp_path / "a.pt", weights_only=True)
    theirs.load_state_dict(base_state | adapter_state, strict=True)
    theirs.eval()
    tokens = rng.integers(1, shape["vocab_size"], (2, 9))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
        bare = checkpoint.model(torch.from_numpy(tokens)).logits.numpy()
    ours = attach_adapter(load_model(base), tmp_path / "a")
    found = np.array(ours(mx.array(tokens)))
    size = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 1e-4 * size
    assert np.abs(bare - wanted).max() > 0.05 * size


def _wrapped(key):
    """A plain layer's key when the layer carries adapters."""
    if ".fused_linear." in key:
        return key.replace(".fused_linear.", ".wrapped.fused_linear.")
    return key.replace(".weight", ".wrapped.weight")


def test_keys_are_tamms_in_order():
    config = AFMTextV7.Config(
        adapters={"base_adapter": LoRAModelAdapter(rank=32, alpha=16)},
        arch_optimizers={"kv_quant": KVQuantArchOptimizer()},
        device="meta",
    )
    state = config.create_model().state_dict()
    wanted = {key: tuple(tensor.shape) for key, tensor in state.items() if "adapters" in key}
    found = {}
    for place in pair_places(PRESETS["afm-3b"]):
        found[adapter_key(place.a, "base_adapter", True)] = (place.inputs, 32)
        found[adapter_key(place.b, "base_adapter", True)] = (32, place.outputs)
    assert len(wanted) == 700
    assert list(found.items()) == list(wanted.items())


def trained(checkpoint, path):
    """What the toolkit's trainer saves: the adapter's part of the state dict."""
    state = {k: v for k, v in checkpoint.model.state_dict().items() if "adapter" in k}
    torch.save(state, path)
    return path


def test_the_trainer_s_files(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"base_adapter": {"rank": 6, "alpha": 9}})
    path = trained(checkpoint, checkpoint.folder / "adapter-final.pt")
    tensors, config = read_adapter(path)
    assert (config.rank, config.scale, config.num_layers) == (6, 1.5, SMALL["num_layers"])
    folder = convert(checkpoint.folder, tmp_path / "out")
    wanted, _ = read_adapter(folder / "adapters/base_adapter")
    assert equal(tensors, wanted)
    # The base model's own file holds the same adapter.
    assert equal(read_adapter(checkpoint.weights)[0], wanted)
    assert read_adapter(path, alpha=3)[1].scale == 0.5


def test_without_a_config(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 32, "alpha": 1}})
    assert read_adapter(trained(checkpoint, tmp_path / "x.pt"))[1].scale == 0.5
    checkpoint = make_checkpoint(adapters={"a": {"rank": 8, "alpha": 1}}, folder="other")
    path = trained(checkpoint, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match=r"rank 8 and no alpha.*--alpha"):
        read_adapter(path)
    assert read_adapter(path, alpha=2)[1].scale == 0.25


def test_files_that_are_refused(make_checkpoint, draw_adapter, model_config, tmp_path):
    checkpoint = make_checkpoint(
        adapters={"one": {"rank": 4}, "two": {"rank": 4}}, name="base-model"
    )
    path = trained(checkpoint, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"holds 2 adapters \(one, two\)"):
        read_adapter(path)
    state = torch.load(path, weights_only=True)
    state = {k: v for k, v in state.items() if ".one." in k}
    key = next(k for k in state if "linear_0" in k)

    def refused(change, words):
        torch.save(state | change, path)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(path, alpha=1)

    refused({key: state[key] / 0}, "NaN or infinity")
    refused({key: state[key].long()}, "of type torch.int64")
    refused({key: state[key][0].clone()}, "a matrix is needed")
    refused({key: state[key][:, :2].clone()}, r"ranks \[2, 4\]")
    refused({"x": torch.zeros(2)}, "unknown tensors: x")
    torch.save({"state": state}, path)
    with pytest.raises(CheckpointError, match="other things than tensors"):
        read_adapter(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        read_adapter(path)
    tensors, config = draw_adapter(model_config)
    with pytest.raises(CheckpointError, match="is no name of one"):
        write_adapter(tmp_path / "a", tensors, config, "toolkit", model_config=model_config)
    with pytest.raises(CheckpointError, match="is not for Apple's 3B model"):
        write_adapter(tmp_path / "a.pt", tensors, config, "toolkit")
    (tmp_path / "b-config.json").write_text("{}")
    with pytest.raises(AFMError, match="exists already"):
        write_adapter(tmp_path / "b.pt", tensors, config, "toolkit", model_config=model_config)


def test_a_config_of_another_run(make_checkpoint):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    path = trained(checkpoint, checkpoint.folder / "x.pt")
    values = json.loads(checkpoint.config_path.read_text())
    values["adapters"]["a"]["rank"] = 5
    checkpoint.config_path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="rank 4, and the config beside it says 5"):
        read_adapter(path)

"""tamm's PT-MoE checkpoints become folders that compute the same, and folders become checkpoints again."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from tamm.models.afm_text.afm_pt_moe import AFMParallelTrackMoEConfig
from tamm.utils import json as tamm_json

from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.convert import convert
from afm_mlx.converters.tracks import tamm_keys
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.track_config import TRACK_PRESETS, TrackConfig
from tests.tools.compare import assert_close
from tests.tools.tracks import SMALL, tamm_logits, tamm_model

SWITCHES = {
    "post_norm": "rms_norm",
    "pre_residual_norm": "pre_scale_rms_norm",
    "tracks_dispatch_norm": "rms_norm",
    "tracks_combine_norm": "rms_norm",
    "experts_router_logits_cap": None,
    "tracks_combine_op": "sum",
    "scale_qk_norm": False,
    "num_kv_heads": None,
}


@pytest.fixture
def make_tracks(tmp_path, tokenizer_bytes):
    """A checkpoint in `assets`, and tamm's model."""

    def make(dtype=torch.float32, **changes):
        config = TrackConfig(**SMALL | {"vocab_size": 512, "num_layers_per_track": 4} | changes)
        values = config.to_dict()
        del values["model_type"], values["max_position_embeddings"]
        model, folder = tamm_model(config, 1).to(dtype), tmp_path / "assets"
        folder.mkdir()
        torch.save(model.state_dict(), folder / "base-model.pt")
        text = tamm_json.dumps(AFMParallelTrackMoEConfig(**values))
        (folder / "base-model-config.json").write_text(text)
        (folder / "tokenizer.model").write_bytes(tokenizer_bytes)
        return folder, model

    return make


@pytest.mark.parametrize("changes", [{}, SWITCHES])
def test_a_folder_computes_what_tamm_computes_and_becomes_the_checkpoint_again(
    make_tracks, tmp_path, rng, changes
):
    checkpoint, theirs = make_tracks(**changes)
    folder = convert(checkpoint, tmp_path / "out")
    model, tokenizer = load(folder)
    tokens = rng.integers(1, 512, (2, 9))
    assert_close(model(mx.array(tokens)), tamm_logits(theirs, tokens), 1e-4)
    assert tokenizer.decode(tokenizer.encode("some words")) == "some words"
    back = convert(folder, tmp_path / "back", to="tamm")
    found, wanted = (torch.load(each / "base-model.pt") for each in (back, checkpoint))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    again = tamm_json.loads((back / "base-model-config.json").read_text())
    assert again == tamm_json.loads((checkpoint / "base-model-config.json").read_text())
    again.create_model().load_state_dict(found)
    assert (back / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


def test_keys_of_the_defaults_are_tamms():
    with torch.device("meta"):
        theirs = AFMParallelTrackMoEConfig(device="meta").create_model().state_dict()
    keys = set(tamm_keys(TRACK_PRESETS["tamm-default"]).values())
    assert len(theirs) == 459
    assert keys == theirs.keys() - {"output_transform.weight"}


def test_types(make_tracks, tmp_path):
    checkpoint, _ = make_tracks(torch.bfloat16)
    kept = convert(checkpoint, tmp_path / "kept")
    cast = convert(checkpoint, tmp_path / "cast", dtype="float16")
    for folder, dtype in ((kept, mx.bfloat16), (cast, mx.float16)):
        assert {array.dtype for array in load_weights(folder).values()} == {dtype}
    back = torch.load(convert(kept, tmp_path / "back", to="tamm") / "base-model.pt")
    assert all(
        torch.equal(tensor, back[key])
        for key, tensor in torch.load(checkpoint / "base-model.pt").items()
    )


@pytest.mark.parametrize("bits", [3, 4])
def test_packed_experts_are_the_products_of_their_numbers(make_tracks, tmp_path, bits):
    checkpoint, _ = make_tracks(
        sparse_feed_forward_hidden_dim=32, dense_feed_forward_hidden_dim=64, vocab_size=576
    )
    floats = convert(checkpoint, tmp_path / "floats")
    packed = convert(floats, tmp_path / "packed", quantize=True, q_bits=bits, q_group_size=32)
    plain = convert(packed, tmp_path / "plain", dequantize=True)
    models = [load(folder)[0] for folder in (packed, plain)]
    settings = json.loads((packed / "config.json").read_text())["quantization"]
    assert settings["bits"] == bits
    for tokens in ([[7]], np.arange(40).reshape(2, 20) + 1):  # single rows, and sorted ones
        assert_close(*(model(mx.array(tokens)) for model in models), 1e-3)


# -- refusals


def test_what_contradicts_its_config_is_refused(make_tracks, tmp_path):
    checkpoint, _ = make_tracks()
    path, weights = checkpoint / "base-model-config.json", checkpoint / "base-model.pt"
    values, state = json.loads(path.read_text()), torch.load(weights)
    for changes, says in (
        ({"shared_expert": 1}, "unknown keys shared_expert"),
        ({"adapters": {"a": {}}}, "adapters of a parallel-track model can't be converted"),
        ({"num_layers_per_track_per_sync_point": 3}, "a divisor of num_layers_per_track"),
    ):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(ConfigError, match=says):
            convert(checkpoint, tmp_path / "out")
    path.write_text(json.dumps(values | {"num_experts": 4}))
    with pytest.raises(CheckpointError, match=r"of the wrong shape: .*router"):
        convert(checkpoint, tmp_path / "out")
    path.write_text(json.dumps(values))
    state["output_transform.weight"] = state["output_transform.weight"] + 1
    torch.save(state, weights)
    with pytest.raises(CheckpointError, match="the head is not the embedding"):
        convert(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_conversions_are_refused(make_tracks, tmp_path):
    checkpoint, _ = make_tracks()
    with pytest.raises(AFMError, match="then convert that folder with -q"):
        convert(checkpoint, tmp_path / "out", quantize=True)
    floats = convert(checkpoint, tmp_path / "floats")
    packed = convert(floats, tmp_path / "packed", quantize=True, q_bits=8, q_group_size=32)
    with pytest.raises(AFMError, match="Convert a packed folder with -d first"):
        convert(packed, tmp_path / "back", to="tamm")
    (floats / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is missing"):
        convert(floats, tmp_path / "back", to="tamm")
    with pytest.raises(AFMError, match="--to tamm is for models of type 'afm_pt_moe'"):
        convert(resolve_model("afm-nano"), tmp_path / "back", to="tamm")

"""Adapters of singular vectors: the best approximation of a rank, and models that they bring nearer."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.target_modules import linear_weight, target_modules
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.convert import convert
from afm_mlx.converters.svd_adapter import low_rank
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_adapter
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL
from afm_mlx.track_config import TrackConfig
from tests.tools.compare import assert_same, error
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB, RANK = 64, 4


def best(matrix, rank):
    """NumPy's best approximation of a rank."""
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (3, 20), (20, 3), (1, 1)])
@pytest.mark.parametrize("rank", [1, 4])
def test_the_best_approximation_of_a_rank(shape, rank, rng):
    matrix = rng.normal(size=shape).astype(np.float32)
    a, b = low_rank(matrix, rank)
    assert (a.shape, b.shape) == ((shape[1], rank), (rank, shape[0]))
    np.testing.assert_allclose((a @ b).T, best(matrix, rank), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1), rtol=1e-5)


def test_a_matrix_without_errors_has_an_adapter_of_zeros():
    a, b = low_rank(np.zeros((4, 6), np.float32), 2)
    assert not a.any()
    assert not b.any()


@pytest.fixture
def floats(request, rng, tmp_path, make_checkpoint):
    """A float folder, AFM's or mlx-lm's, whose layers' singular values fall."""
    if request.param == "afm":
        folder = convert(make_checkpoint().folder, tmp_path / "float")
    elif request.param == TRACK_MODEL:
        widths = dict.fromkeys(re.findall(r"\S*hidden_dim", " ".join(SMALL)), 32)
        config = TrackConfig(**SMALL | widths)
        folder = write_tracks_folder(
            tmp_path / "float", random_tracks(config, int(rng.integers(2**31)))
        )
        (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer_json(VOCAB)))
    else:
        folder = tmp_path / "float"
        model = zoo_model(request.param, VOCAB, int(rng.integers(2**31)))
        write_zoo_folder(folder, request.param, model, word_tokenizer_json(VOCAB))
    weights = load_weights(folder)
    for name, array in weights.items():
        if array.ndim > 1 and not re.search("embed|norm", name):
            u, s, v = np.linalg.svd(np.array(array.astype(mx.float32)), full_matrices=False)
            falling = (u * (s[..., :1] * np.arange(1, s.shape[-1] + 1) ** -0.7)[..., None, :]) @ v
            weights[name] = mx.array(falling.astype(np.float32))
    (path,) = folder.glob("*.safetensors")
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    return folder


def matrices(model):
    return {t.path: np.array(linear_weight(t.linear)) for t in target_modules(model)}


def added(folder, model):
    """What an adapter adds to the matrices of layers that it has."""
    tensors, config = load_adapter(folder / "adapters" / "svd")
    assert (config.scale, config.rank) == (1.0, RANK)
    found = {}
    for target in target_modules(model):
        if not any(name.startswith(f"{target.path}.lora_") for name in tensors):
            continue
        pairs = [
            [np.array(tensors[f"{target.path}.lora_{side}{suffix}"], np.float32) for side in "ab"]
            for suffix in target.shapes
        ]
        found[target.path] = np.concatenate([(a @ b).T for a, b in pairs])
    return found


AFM2 = {"q_bits": 2}
AFFINE = {"q_bits": 4, "q_group_size": 32}
CASES = [
    ("afm", AFM2),
    ("afm", {"q_mode": "affine", "q_bits": 4, "q_granularity": "row"}),
    ("llama", AFFINE),
    ("llama", {"q_mode": "balanced"}),
    ("qwen3_moe", AFFINE),
    ("llama", {"q_mode": "mxfp4"}),
    (TRACK_MODEL, AFFINE),
    (TRACK_MODEL, {"q_mode": "balanced"}),
]


@pytest.mark.parametrize(("floats", "options"), CASES, indirect=["floats"])
def test_the_error_of_packing_is_approximated_best(floats, options, rng, tmp_path):
    folder = convert(floats, tmp_path / "packed", quantize=True, svd_adapter=RANK, **options)
    plain = convert(floats, tmp_path / "plain", quantize=True, **options)
    for name, array in load_weights(plain).items():
        assert_same(load_weights(folder)[name], array)
    whole, packed = load(floats)[0], load(folder)[0]
    wanted, got, more = matrices(whole), matrices(packed), added(folder, packed)
    for target in target_modules(packed):
        difference = wanted[target.path] - got[target.path]
        if target.path not in more:  # a router, float
            assert not difference.any()
            continue
        ends = target.sections or (len(difference),)
        rest = np.split(difference, ends[:-1])
        left = np.concatenate([part - best(part, RANK) for part in rest])
        found = difference - more[target.path]
        assert np.linalg.norm(found) <= 1.002 * np.linalg.norm(left) + 1e-6  # pairs are float16
        assert np.linalg.norm(found) < np.linalg.norm(difference)
    tokens = mx.array(rng.integers(2, VOCAB, (2, 9)))
    adapted = load(folder, adapter_path=str(resolve_adapter("svd", folder)))[0]
    # In use; that each layer is nearer to the floats doesn't say so of a small random model's logits.
    assert error(adapted(tokens), packed(tokens)) > 1e-3


@pytest.mark.parametrize(
    ("floats", "options"), [CASES[0], CASES[2], CASES[-1]], indirect=["floats"]
)
def test_the_largest_vectors_of_the_weights_are_not_packed(floats, options, tmp_path):
    options = {"quantize": True, **options}
    folder = convert(floats, tmp_path / "packed", svd_adapter=RANK, svd_of="weights", **options)
    plain = load(convert(floats, tmp_path / "plain", **options))[0]
    whole, packed = load(floats)[0], load(folder)[0]
    wanted, alone, rest = matrices(whole), matrices(plain), matrices(packed)
    more = added(folder, packed)
    for target in target_modules(packed):
        matrix = wanted[target.path]
        ends = target.sections or (len(matrix),)
        largest = np.concatenate([best(part, RANK) for part in np.split(matrix, ends[:-1])])
        scale = np.linalg.norm(matrix)
        assert np.linalg.norm(more[target.path] - largest) < 2e-3 * scale
        both = np.linalg.norm(matrix - rest[target.path] - more[target.path])
        assert both < max(0.9 * np.linalg.norm(matrix - alone[target.path]), 1e-6 * scale)
    load(folder, adapter_path=str(folder / "adapters" / "svd"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("floats", ["llama"], indirect=True)
def test_equal_folders_give_equal_bytes(floats, tmp_path):
    for name in "ab":
        convert(floats, tmp_path / name, quantize=True, svd_adapter=2, **AFFINE)
    one, other = (tmp_path / n / "adapters" / "svd" / "adapters.safetensors" for n in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_a_checkpoint_gets_an_adapter_too(make_checkpoint, tmp_path):
    folder = convert(make_checkpoint().folder, tmp_path / "packed", quantize=True, svd_adapter=2)
    assert load_adapter(folder / "adapters" / "svd")[1].rank == 2
    load(folder, adapter_path=str(folder / "adapters" / "svd"))


@pytest.mark.parametrize("floats", ["llama"], indirect=True)
def test_what_is_refused(floats, tmp_path):
    packed = convert(floats, tmp_path / "packed", quantize=True, **AFFINE)
    for source, options, words in (
        (floats, {"svd_adapter": 2}, "--svd-adapter without -q"),
        (floats, {"quantize": True, "svd_of": "error"}, "--svd-of without --svd-adapter RANK"),
        (floats, {"quantize": True, "svd_adapter": 0}, "--svd-adapter is 0; allowed are ranks"),
        (floats, {"quantize": True, "svd_adapter": 2, "svd_of": "x"}, "--svd-of is 'x'"),
        (packed, {"quantize": True, "svd_adapter": 2}, "is quantized already"),
        (packed, {"quantize": True, "svd_adapter": 2, "svd_of": "weights"}, "is quantized already"),
    ):
        with pytest.raises(AFMError, match=words):
            convert(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

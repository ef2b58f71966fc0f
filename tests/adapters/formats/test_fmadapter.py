"""Packages are what Apple's exporter writes: checked by hand-made rules and coremltools' own writer."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.formats import PackageMetadata, read_adapter, write_adapter
from afm_mlx.adapters.formats.fmadapter import BASE_SIGNATURE, DRAFT_NAMES, read_metadata
from afm_mlx.adapters.formats.pair_order import pair_targets
from afm_mlx.config import PRESETS
from afm_mlx.errors import CheckpointError, ConfigError
from tests.adapters.formats.conftest import assert_same_numbers, core_ml_bytes
from tests.tools.cases import each
from tests.tools.compare import assert_within, exact


def exported(tensors, places, rank=32, scale=0.5):
    """The arrays of a package as the exporter makes them, in torch: the reference.

    alpha is not in the file: B is such that 16 / 32 gives the adapter's own scale.
    """
    import torch

    for place in places:
        a, b = (torch.from_numpy(exact(tensors[n])).T for n in (place.a, place.b))
        a, b = a.half(), (b * scale / 0.5).half()
        if place.rotary_heads:
            split = b.reshape(place.rotary_heads, -1, 2, b.shape[1])
            b = split.transpose(1, 2).reshape(b.shape)
        for matrix, fill in ((a, (0, 0, 0, rank - a.shape[0])), (b, (0, rank - b.shape[1]))):
            yield torch.nn.functional.pad(matrix, fill).contiguous().numpy()


@pytest.fixture
def write_package(draw_adapter, model_config, tmp_path):
    """A function that writes a package of a random adapter; the package and the adapter's tensors."""

    def write(name="a", rank=32, scale=0.5, *, package=None, any_rank=False, **drawn):
        tensors, config = draw_adapter(model_config, rank, scale, **drawn)
        path = tmp_path / f"{name}.fmadapter"
        options = {"model_config": model_config, "package": package, "any_rank": any_rank}
        write_adapter(path, tensors, config, "fmadapter", **options)
        return path, tensors

    return write


@pytest.fixture
def package(write_package):
    return write_package()[0]


@pytest.fixture
def edit_metadata(package):
    path = package / "metadata.json"
    values = json.loads(path.read_text())
    return lambda **change: path.write_text(json.dumps(values | change))


@pytest.mark.parametrize(("rank", "scale"), [(32, 0.5), (8, 0.5), (16, 0.7)])
def test_a_package_is_byte_for_byte_the_exporter_s(
    core_ml, write_package, model_config, tmp_path, rank, scale
):
    path, tensors = write_package("poet", rank, scale, package=PackageMetadata("poet"))
    arrays = exported(tensors, pair_targets(model_config), 32, scale)
    wanted, _ = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    assert (path / "adapter_weights.bin").read_bytes() == wanted
    assert sorted(p.name for p in path.iterdir()) == ["adapter_weights.bin", "metadata.json"]
    found, found_config = read_adapter(path, model_config)
    assert found_config.scale == 0.5
    for name in tensors:
        wanted = exact(tensors[name]) * (scale / 0.5 if ".lora_b" in name else 1)
        assert_within(found[name], wanted, 2**-11 * np.abs(wanted) + 1e-7, name)


def test_metadata(write_package):
    package = PackageMetadata("poet", "A. Uthor", "Writes poems", "MIT", "12ab" * 10)
    path, _ = write_package("poet", package=package, fingerprint=None)
    values = {
        "adapterIdentifier": "fmadapter-poet-12ab12a", "author": "A. Uthor", "license": "MIT",
        "baseModelSignature": "12ab" * 10, "creatorDefined": {}, "description": "Writes poems",
        "loraRank": 32, "speculativeDecodingDraftTokenCount": 5,
    }  # fmt: skip
    assert (path / "metadata.json").read_text() == json.dumps(values, indent=4, sort_keys=True)
    assert read_metadata(path) == (package, 32)


@pytest.mark.parametrize(
    "notes",
    [
        *({"rank": 7}, {"scale": 3.0}, {"scale": 1e30}, {"rank": -1, "scale": "2"}, 5),
        # Factors that float32 turns to zeros and infinities.
        *({"scale": sign * 2.0**power} for sign in (1, -1) for power in (-300, -140, 140, 1000)),
        {"scale": 10**400},
    ],
)
def test_notes_that_lie_change_nothing(write_package, model_config, notes):
    path, tensors = write_package(package=PackageMetadata("a", base_signature="12" * 20))
    values = json.loads((path / "metadata.json").read_text())
    values["creatorDefined"] = {"afm-mlx": notes}
    (path / "metadata.json").write_text(json.dumps(values))
    found, found_config = read_adapter(path, model_config)
    assert (found_config.rank, found_config.scale) == (32, 0.5)
    assert_same_numbers(found, tensors)


def test_draft_models_pass_through(write_package, model_config, rng, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in DRAFT_NAMES:
        (draft / name).write_bytes(rng.bytes(500))
    path, _ = write_package(package=PackageMetadata("a", draft=draft))
    package, _ = read_metadata(path)
    adapter, again = read_adapter(path, model_config), tmp_path / "b.fmadapter"
    write_adapter(again, *adapter, "fmadapter", model_config=model_config, package=package)
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in path.iterdir()
    }
    assert {file.name for file in draft.iterdir()} < {file.name for file in path.iterdir()}
    (draft / "draft.mil").unlink()
    for folder, words in ((draft, r"holds draft_weights\.bin alone"), (path.parent, "no draft")):
        with pytest.raises(CheckpointError, match=words):
            write_package("c", package=PackageMetadata("c", draft=folder))
    assert not (tmp_path / "c.fmadapter").exists()


@each(
    ("package", "fingerprint", "words"),
    [
        (PackageMetadata("my-poet"), "ab" * 32, "take --name my_poet"),
        (PackageMetadata("../poet"), "ab" * 32, "letters, digits and '_'"),
        (PackageMetadata("poet", base_signature="12"), "ab" * 32, "'12'; it has 40 hex digits"),
        (None, "my model", r"'my model'\. Give the signature"),
    ],
)
def test_packages_that_would_not_load(write_package, tmp_path, package, fingerprint, words):
    with pytest.raises(CheckpointError, match=words):
        write_package(package=package, fingerprint=fingerprint)
    assert list(tmp_path.iterdir()) == []


def test_a_fingerprint_that_is_no_signature_is_kept(write_package, model_config):
    package = PackageMetadata("a", base_signature="12" * 20)
    path, _ = write_package(package=package, fingerprint="my model")
    assert read_adapter(path, model_config)[1].base_model_fingerprint == "my model"


def test_ranks_above_the_runtime_s(write_package, model_config):
    with pytest.raises(CheckpointError, match="rank 33, and Apple's runtime takes 32"):
        write_package("a", 33, 0.4)
    path, tensors = write_package("a", 40, 0.4, any_rank=True)
    found, found_config = read_adapter(path, model_config)
    assert (found_config.rank, found_config.scale) == (40, 0.4)
    assert_same_numbers(found, tensors)


def test_numbers_beyond_float16(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, scale=1.0, dtype=mx.float32)
    name = pair_targets(model_config)[-1].b
    tensors[name] = tensors[name] + 40000  # times 1.0 / 0.5
    path = tmp_path / "a.fmadapter"
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_b holds .* float16's 65504"):
        write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    assert list(tmp_path.iterdir()) == []


@each(
    ("change", "words"),
    [
        ({"loraRank": 0}, "loraRank is 0"),
        ({"loraRank": "32"}, "loraRank is '32'"),
        ({"loraRank": 10**400}, "a whole number of 1 to 65536"),
        ({"description": "\ud800"}, "must be Unicode text"),
        ({"adapterIdentifier": "fmadapter-../../x-1"}, "adapterIdentifier is"),
        ({"baseModelSignature": "xy"}, "40 hex digits"),
        ({"author": 5}, "author"),
        ({"creatorDefined": []}, "creatorDefined"),
        ({"speculativeDecodingDraftTokenCount": -1}, "DraftTokenCount is -1"),
    ],
)
def test_metadata_that_can_not_be_used(package, model_config, edit_metadata, change, words):
    edit_metadata(**change)
    with pytest.raises(ConfigError, match=words):
        read_adapter(package, model_config)


def test_a_wrong_rank_or_model(package, model_config, edit_metadata):
    other = dataclasses.replace(model_config, num_layers=model_config.num_layers + 1)
    for base, words in (
        (None, "and this model has 700.*--model"),
        (other, r"this model has \d+\.$"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_adapter(package, base)
    edit_metadata(loraRank=16)
    with pytest.raises(CheckpointError, match=r"blob 0, .* numbers, and this model needs"):
        read_adapter(package, model_config)


@pytest.mark.slow
def test_the_real_shape(core_ml, draw_adapter, tmp_path):
    path = tmp_path / "poet.fmadapter"
    tensors, config = draw_adapter(PRESETS["afm-3b"], 32, fingerprint=None)
    write_adapter(path, tensors, config, "fmadapter")
    assert (path / "adapter_weights.bin").stat().st_size == 133_312_320
    arrays = exported(tensors, pair_targets(PRESETS["afm-3b"]))
    wanted, offsets = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    assert len(offsets) == 700
    assert (path / "adapter_weights.bin").read_bytes() == wanted
    assert read_metadata(path)[0].base_signature == BASE_SIGNATURE
    found, found_config = read_adapter(path)
    assert_same_numbers(found, tensors)
    assert found_config == config

"""Packages are what Apple's exporter writes: checked by hand-made rules and coremltools' own reader."""

import dataclasses
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.formats import PackageMetadata, read_adapter, write_adapter
from afm_mlx.adapters.formats.fmadapter import BASE_SIGNATURE, read_metadata
from afm_mlx.adapters.formats.mil_blob import read_blobs, write_blobs
from afm_mlx.adapters.formats.pair_order import pair_places
from afm_mlx.config import PRESETS
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.adapters.formats.conftest import equal


@pytest.fixture(scope="module")
def core_ml():
    """coremltools' extension module, which few platforms have."""
    return pytest.importorskip("coremltools.libmilstoragepython")


def core_ml_bytes(core_ml, path, arrays):
    writer = core_ml._BlobStorageWriter(str(path))
    offsets = [writer.write_fp16_data(a.reshape(-1).view(np.uint16)) for a in arrays]
    del writer
    return path.read_bytes(), offsets


def exported(tensors, places, rank=32):
    """The arrays of a package as the exporter makes them, in torch: the reference."""
    import torch

    for place in places:
        a, b = (
            torch.from_numpy(np.array(tensors[n].astype(mx.float16))).T for n in (place.a, place.b)
        )
        heads = place.rotary_heads
        if heads:
            rows, columns = b.shape
            b = (
                b.reshape(heads, rows // heads // 2, 2, columns)
                .transpose(1, 2)
                .reshape(rows, columns)
            )
        for matrix, fill in ((a, (0, 0, 0, rank - a.shape[0])), (b, (0, rank - b.shape[1]))):
            yield torch.nn.functional.pad(matrix, fill).contiguous().numpy()


def test_blobs_are_those_of_coremltools(core_ml, rng, tmp_path):
    sizes = [int(n) for n in rng.integers(1, 300, 20)]
    arrays = [rng.normal(size=n).astype(np.float16) for n in sizes]
    wanted, offsets = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    write_blobs(tmp_path / "ours.bin", iter(arrays), len(arrays))
    assert (tmp_path / "ours.bin").read_bytes() == wanted
    reader = core_ml._BlobStorageReader(str(tmp_path / "ours.bin"))
    for array, blob, offset in zip(
        arrays, read_blobs(tmp_path / "theirs.bin"), offsets, strict=True
    ):
        np.testing.assert_array_equal(blob, array)
        theirs = np.array(reader.read_fp16_data(offset)).view(np.float16)
        np.testing.assert_array_equal(theirs, array)


@pytest.mark.parametrize("rank", [32, 8])
def test_a_package_is_byte_for_byte_the_exporter_s(
    core_ml, rank, draw_adapter, model_config, tmp_path
):
    tensors, config = draw_adapter(model_config, rank)
    write_adapter(
        tmp_path / "poet.fmadapter",
        tensors,
        config,
        "fmadapter",
        model_config=model_config,
        package=PackageMetadata("poet", base_signature="12" * 20),
    )
    arrays = list(exported(tensors, pair_places(model_config)))
    wanted, _ = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    assert (tmp_path / "poet.fmadapter/adapter_weights.bin").read_bytes() == wanted
    names = sorted(path.name for path in (tmp_path / "poet.fmadapter").iterdir())
    assert names == ["adapter_weights.bin", "metadata.json"]


def test_metadata(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, 32, fingerprint=None)
    path = tmp_path / "poet.fmadapter"
    package = PackageMetadata("poet", "A. Uthor", "Writes poems", "MIT", "12ab" * 10)
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config, package=package)
    text = (path / "metadata.json").read_text()
    values = {
        "adapterIdentifier": "fmadapter-poet-12ab12a",
        "author": "A. Uthor",
        "baseModelSignature": "12ab" * 10,
        "creatorDefined": {},
        "description": "Writes poems",
        "license": "MIT",
        "loraRank": 32,
        "speculativeDecodingDraftTokenCount": 5,
    }
    assert text == json.dumps(values, indent=4, sort_keys=True)
    assert read_metadata(path) == (package, 32)


def test_the_scale_of_the_runtime(draw_adapter, model_config, rng, tmp_path):
    """alpha is not in the file: B is such that 16 / 32 gives the adapter's own scale."""
    scale = float(rng.uniform(0.1, 3))
    tensors, config = draw_adapter(model_config, 16, scale)
    write_adapter(tmp_path / "a.fmadapter", tensors, config, "fmadapter", model_config=model_config)
    blobs = read_blobs(tmp_path / "a.fmadapter/adapter_weights.bin")
    for index, place in enumerate(pair_places(model_config)):
        stored = blobs[2 * index + 1].reshape(place.outputs, 32).astype(np.float32)
        wanted = np.array(tensors[place.b].astype(mx.float32)).T * scale / 0.5
        if place.rotary_heads:  # the inverse of the exporter's permutation
            half = place.outputs // place.rotary_heads // 2
            stored = stored.reshape(place.rotary_heads, 2, half, 32).swapaxes(1, 2)
            stored = stored.reshape(place.outputs, 32)
        np.testing.assert_allclose(stored[:, :16], wanted, rtol=2**-10, atol=1e-7)
        assert not stored[:, 16:].any()
    found, found_config = read_adapter(tmp_path / "a.fmadapter", model_config)
    assert found_config.scale == 0.5
    for name in tensors:
        wanted = tensors[name].astype(mx.float32) * (2 * scale if "lora_b" in name else 1)
        assert mx.allclose(found[name].astype(mx.float32), wanted, rtol=2**-10, atol=1e-7).item()


def test_notes_that_lie_change_nothing(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, 32)
    path = tmp_path / "a.fmadapter"
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    values = json.loads((path / "metadata.json").read_text())
    claims = [
        *({"rank": 7}, {"scale": 3.0}, {"scale": 1e30}, {"rank": -1, "scale": "2"}, 5),
        # Factors that float32 turns to zeros and infinities.
        *(
            {"scale": sign * 2.0**power}
            for sign in (1, -1)
            for power in (-300, -140, 140, 300, 1000)
        ),
        {"scale": 10**400},
    ]
    for notes in claims:
        values["creatorDefined"] = {"afm-mlx": notes}
        (path / "metadata.json").write_text(json.dumps(values))
        found, found_config = read_adapter(path, model_config)
        assert (found_config.rank, found_config.scale) == (32, 0.5)
        assert equal(found, tensors)


def test_draft_models_pass_through(draw_adapter, model_config, rng, tmp_path):
    tensors, config = draw_adapter(model_config, 32)
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("draft.mil", "draft_weights.bin"):
        (draft / name).write_bytes(rng.bytes(500))
    path = tmp_path / "a.fmadapter"
    package = PackageMetadata("a", draft=draft)
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config, package=package)
    package, _ = read_metadata(path)
    write_adapter(
        tmp_path / "b.fmadapter",
        *read_adapter(path, model_config),
        "fmadapter",
        model_config=model_config,
        package=package,
    )
    for name in ("draft.mil", "draft_weights.bin", "adapter_weights.bin", "metadata.json"):
        assert (tmp_path / "b.fmadapter" / name).read_bytes() == (path / name).read_bytes()
    (draft / "draft.mil").unlink()
    with pytest.raises(CheckpointError, match=r"holds draft_weights\.bin alone"):
        write_adapter(
            tmp_path / "c.fmadapter",
            tensors,
            config,
            "fmadapter",
            model_config=model_config,
            package=PackageMetadata("c", draft=draft),
        )
    assert not (tmp_path / "c.fmadapter").exists()


def test_a_draft_that_is_not_there(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config)
    package = PackageMetadata("a", draft=tmp_path)
    with pytest.raises(CheckpointError, match="holds no draft model"):
        write_adapter(
            *(tmp_path / "a.fmadapter", tensors, config, "fmadapter"),
            model_config=model_config,
            package=package,
        )
    assert not (tmp_path / "a.fmadapter").exists()


def test_a_fingerprint_that_is_no_signature(draw_adapter, model_config, tmp_path):
    """What is written can be read."""
    tensors, config = draw_adapter(model_config, fingerprint="my model")
    path = tmp_path / "a.fmadapter"
    with pytest.raises(CheckpointError, match=r"'my model'\. Give the signature"):
        write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    package = PackageMetadata("a", base_signature="12" * 20)
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config, package=package)
    assert read_adapter(path, model_config)[1].base_model_fingerprint == "my model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"package": PackageMetadata("my-poet")}, "take --name my_poet"),
        ({"package": PackageMetadata("../poet")}, "letters, digits and '_'"),
        ({"package": PackageMetadata("poet", base_signature="12")}, "'12'; it has 40 hex digits"),
    ],
)
def test_packages_that_would_not_load(options, words, draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config)
    with pytest.raises(CheckpointError, match=words):
        write_adapter(
            tmp_path / "a.fmadapter",
            tensors,
            config,
            "fmadapter",
            model_config=model_config,
            **options,
        )
    assert not (tmp_path / "a.fmadapter").exists()


def test_ranks_above_the_runtime_s(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, 40, 0.4)
    path = tmp_path / "a.fmadapter"
    with pytest.raises(CheckpointError, match="rank 40, and Apple's runtime takes 32"):
        write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config, any_rank=True)
    found, found_config = read_adapter(path, model_config)
    assert (found_config.rank, found_config.scale) == (40, 0.4)
    assert equal(found, tensors)


def test_numbers_beyond_float16(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, scale=1.0, dtype=mx.float32)
    name = pair_places(model_config)[-1].b
    tensors[name] = tensors[name] + 40000  # times 1.0 / 0.5
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_b holds .* float16's 65504"):
        write_adapter(
            tmp_path / "a.fmadapter", tensors, config, "fmadapter", model_config=model_config
        )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def package(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, 32)
    path = tmp_path / "a.fmadapter"
    write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d[:-2], "It is cut off"),
        (lambda d: d[:63], "has 63 bytes"),
        (lambda d: d[:200], "cut off"),
        (lambda d: d + bytes(100), "after its last blob"),
        (lambda d: b"\1" + d[1:], "after its last blob"),
        (lambda d: b"\xff\xff\xff\xff" + d[4:], "announces 4294967295 blobs"),
        (lambda d: d[:4] + b"\1" + d[5:], "its header says 1"),
        (lambda d: d[:64] + b"\0" + d[65:], "has no record"),
        (lambda d: d[:68] + b"\2" + d[69:], "is of type 2"),
        (lambda d: d[:72] + b"\xff" * 7 + b"\x7f" + d[80:], "of type 1 with|announces"),
        (lambda d: d[:80] + b"\xff" * 8 + d[88:], "has no record"),
        (lambda d: d[:128] + b"\0\x7e" + d[130:], r"lora_a(\.0)? holds NaN or infinity"),
    ],
)
def test_damaged_weights(package, model_config, change, words):
    path = package / "adapter_weights.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=words):
        read_adapter(package, model_config)


@pytest.mark.parametrize(
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
def test_metadata_that_can_not_be_used(package, model_config, change, words):
    path = package / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        read_adapter(package, model_config)


def test_a_wrong_rank_or_model(package, model_config):
    path = package / "metadata.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"loraRank": 16}))
    with pytest.raises(CheckpointError, match=r"blob 0, .* numbers, and this model needs"):
        read_adapter(package, model_config)
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"and this model has 700.*--model"):
        read_adapter(package)
    other = dataclasses.replace(model_config, num_layers=model_config.num_layers + 1)
    with pytest.raises(CheckpointError, match="blobs, and this model has"):
        read_adapter(package, other)


def test_a_zip_of_a_package(package, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "b.fmadapter"), "zip", package)
    shutil.copy(archive, tmp_path / "b.fmadapter")
    for path in (tmp_path / "b.fmadapter", archive):
        with pytest.raises(AFMError, match="Unpack it first"):
            read_adapter(path)


@pytest.mark.slow
def test_the_real_shape(core_ml, draw_adapter, tmp_path):
    model_config = PRESETS["afm-3b"]
    tensors, config = draw_adapter(model_config, 32, fingerprint=None)
    write_adapter(tmp_path / "poet.fmadapter", tensors, config, "fmadapter")
    path = tmp_path / "poet.fmadapter/adapter_weights.bin"
    assert path.stat().st_size == 133_312_320
    arrays = list(exported(tensors, pair_places(model_config)))
    assert len(arrays) == 700
    wanted, offsets = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    assert path.read_bytes() == wanted
    reader = core_ml._BlobStorageReader(str(path))
    for array, offset in zip(arrays, offsets, strict=True):
        theirs = np.array(reader.read_fp16_data(offset)).view(np.float16)
        np.testing.assert_array_equal(theirs, array.reshape(-1))
    metadata, _ = read_metadata(tmp_path / "poet.fmadapter")
    assert metadata.base_signature == BASE_SIGNATURE
    found, found_config = read_adapter(tmp_path / "poet.fmadapter")
    assert equal(found, tensors)
    assert found_config == config

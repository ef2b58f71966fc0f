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
from tests.adapters.formats.conftest import assert_same_numbers
from tests.tools.compare import assert_same, assert_within, exact


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
        assert_same(blob, array)
        assert_same(np.array(reader.read_fp16_data(offset)).view(np.float16), array)


def test_a_package_is_byte_for_byte_the_exporter_s(core_ml, write_package, model_config, tmp_path):
    for rank in (32, 8):
        metadata = PackageMetadata(f"poet{rank}", base_signature="12" * 20)
        path, tensors = write_package(f"poet{rank}", rank, package=metadata)
        arrays = list(exported(tensors, pair_places(model_config)))
        wanted, _ = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
        assert (path / "adapter_weights.bin").read_bytes() == wanted
        assert sorted(p.name for p in path.iterdir()) == ["adapter_weights.bin", "metadata.json"]


def test_metadata(write_package):
    package = PackageMetadata("poet", "A. Uthor", "Writes poems", "MIT", "12ab" * 10)
    path, _ = write_package("poet", package=package, fingerprint=None)
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


def test_the_scale_of_the_runtime(write_package, model_config, rng):
    """alpha is not in the file: B is such that 16 / 32 gives the adapter's own scale."""
    scale = float(rng.uniform(0.1, 3))
    path, tensors = write_package("a", 16, scale)
    blobs = read_blobs(path / "adapter_weights.bin")
    for index, place in enumerate(pair_places(model_config)):
        stored = blobs[2 * index + 1].reshape(place.outputs, 32).astype(np.float32)
        wanted = exact(tensors[place.b]).T * scale / 0.5
        if place.rotary_heads:  # the inverse of the exporter's permutation
            half = place.outputs // place.rotary_heads // 2
            stored = stored.reshape(place.rotary_heads, 2, half, 32).swapaxes(1, 2)
            stored = stored.reshape(place.outputs, 32)
        assert_within(stored[:, :16], wanted, 2**-10 * np.abs(wanted) + 1e-7, place)
        assert not stored[:, 16:].any()
    found, found_config = read_adapter(path, model_config)
    assert found_config.scale == 0.5
    for name in tensors:
        wanted = exact(tensors[name]) * (2 * scale if "lora_b" in name else 1)
        assert_within(found[name], wanted, 2**-10 * np.abs(wanted) + 1e-7, name)


def test_notes_that_lie_change_nothing(write_package, model_config):
    path, tensors = write_package()
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
        assert_same_numbers(found, tensors)


def test_draft_models_pass_through(write_package, model_config, rng, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("draft.mil", "draft_weights.bin"):
        (draft / name).write_bytes(rng.bytes(500))
    path, _ = write_package(package=PackageMetadata("a", draft=draft))
    package, _ = read_metadata(path)
    options = {"model_config": model_config, "package": package}
    adapter = read_adapter(path, model_config)
    write_adapter(tmp_path / "b.fmadapter", *adapter, "fmadapter", **options)
    for name in ("draft.mil", "draft_weights.bin", "adapter_weights.bin", "metadata.json"):
        assert (tmp_path / "b.fmadapter" / name).read_bytes() == (path / name).read_bytes()
    (draft / "draft.mil").unlink()
    with pytest.raises(CheckpointError, match=r"holds draft_weights\.bin alone"):
        write_package("c", package=PackageMetadata("c", draft=draft))
    with pytest.raises(CheckpointError, match="holds no draft model"):
        write_package("c", package=PackageMetadata("c", draft=tmp_path))
    assert not (tmp_path / "c.fmadapter").exists()


def test_a_fingerprint_that_is_no_signature(write_package, model_config):
    """What is written can be read."""
    with pytest.raises(CheckpointError, match=r"'my model'\. Give the signature"):
        write_package(fingerprint="my model")
    package = PackageMetadata("a", base_signature="12" * 20)
    path, _ = write_package(package=package, fingerprint="my model")
    assert read_adapter(path, model_config)[1].base_model_fingerprint == "my model"


def test_packages_that_would_not_load(write_package, tmp_path):
    for package, words in (
        (PackageMetadata("my-poet"), "take --name my_poet"),
        (PackageMetadata("../poet"), "letters, digits and '_'"),
        (PackageMetadata("poet", base_signature="12"), "'12'; it has 40 hex digits"),
    ):
        with pytest.raises(CheckpointError, match=words):
            write_package(package=package)
        assert list(tmp_path.iterdir()) == []


def test_ranks_above_the_runtime_s(write_package, model_config):
    with pytest.raises(CheckpointError, match="rank 40, and Apple's runtime takes 32"):
        write_package("a", 40, 0.4)
    path, tensors = write_package("a", 40, 0.4, any_rank=True)
    found, found_config = read_adapter(path, model_config)
    assert (found_config.rank, found_config.scale) == (40, 0.4)
    assert_same_numbers(found, tensors)


def test_numbers_beyond_float16(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, scale=1.0, dtype=mx.float32)
    name = pair_places(model_config)[-1].b
    tensors[name] = tensors[name] + 40000  # times 1.0 / 0.5
    path = tmp_path / "a.fmadapter"
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_b holds .* float16's 65504"):
        write_adapter(path, tensors, config, "fmadapter", model_config=model_config)
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights(package, model_config):
    path = package / "adapter_weights.bin"
    whole = path.read_bytes()
    for change, words in (
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
    ):
        path.write_bytes(change(whole))
        with pytest.raises(CheckpointError, match=words):
            read_adapter(package, model_config)


def test_metadata_that_can_not_be_used(package, model_config):
    path = package / "metadata.json"
    values = json.loads(path.read_text())
    for change, words in (
        ({"loraRank": 0}, "loraRank is 0"),
        ({"loraRank": "32"}, "loraRank is '32'"),
        ({"loraRank": 10**400}, "a whole number of 1 to 65536"),
        ({"description": "\ud800"}, "must be Unicode text"),
        ({"adapterIdentifier": "fmadapter-../../x-1"}, "adapterIdentifier is"),
        ({"baseModelSignature": "xy"}, "40 hex digits"),
        ({"author": 5}, "author"),
        ({"creatorDefined": []}, "creatorDefined"),
        ({"speculativeDecodingDraftTokenCount": -1}, "DraftTokenCount is -1"),
    ):
        path.write_text(json.dumps(values | change))
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
        assert_same(theirs, array.reshape(-1))
    metadata, _ = read_metadata(tmp_path / "poet.fmadapter")
    assert metadata.base_signature == BASE_SIGNATURE
    found, found_config = read_adapter(tmp_path / "poet.fmadapter")
    assert_same_numbers(found, tensors)
    assert found_config == config

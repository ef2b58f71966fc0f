"""The toolkit's `.pt` files: tamm loads what is written, and computes what this package computes with it."""

import json
import zipfile

import mlx.core as mx
import pytest
import torch
from tamm.utils import json as tamm_json

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import pair_targets
from afm_mlx.checkpoint.toolkit_checkpoint import adapter_key
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.converters.adapter_conversion import verify_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_model
from tests.adapters.formats.conftest import assert_same_numbers
from tests.converters.conftest import DRAFT, SMALL
from tests.tools.cases import each
from tests.tools.compare import assert_close, error
from tests.tools.models import tamm_3b_state, tamm_logits


@pytest.mark.parametrize("shape", [SMALL, DRAFT], ids=["reuse", "no reuse"])
def test_tamm_computes_what_we_compute(shape, make_checkpoint, draw_adapter, rng, tmp_path):
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
    wanted = tamm_logits(theirs, tokens)
    ours = attach_adapter(load_model(base), tmp_path / "a")
    assert_close(ours(mx.array(tokens)), wanted, 1e-4)
    assert error(tamm_logits(checkpoint.model, tokens), wanted) > 0.05


def _wrapped(key):
    """A plain layer's key when the layer carries adapters."""
    if ".fused_linear." in key:
        return key.replace(".fused_linear.", ".wrapped.fused_linear.")
    return key.replace(".weight", ".wrapped.weight")


def test_keys_are_tamms_in_order():
    state = tamm_3b_state()
    wanted = {key: tuple(tensor.shape) for key, tensor in state.items() if "adapters" in key}
    found = {
        adapter_key(name, "base_adapter", True): shape
        for place in pair_targets(PRESETS["afm-3b"])
        for name, shape in place.shapes(32).items()
    }
    assert len(wanted) == 700
    assert list(found.items()) == list(wanted.items())


def trained(checkpoint, path):
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
    assert_same_numbers(tensors, wanted)
    # The base model's own file holds the same adapter.
    assert_same_numbers(read_adapter(checkpoint.weights)[0], wanted)
    assert read_adapter(path, alpha=3)[1].scale == 0.5


def test_without_a_config(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 32, "alpha": 1}})
    assert read_adapter(trained(checkpoint, tmp_path / "x.pt"))[1].scale == 0.5
    checkpoint = make_checkpoint(adapters={"a": {"rank": 8, "alpha": 1}}, folder="other")
    path = trained(checkpoint, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match=r"rank 8 and no alpha.*--alpha"):
        read_adapter(path)
    assert read_adapter(path, alpha=2)[1].scale == 0.25


@pytest.fixture
def pt(make_checkpoint, tmp_path):
    """A trainer's file of an adapter of rank 4, with no config next to it."""
    return trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")


def refused(path, words, kind=CheckpointError, **options):
    with pytest.raises(kind, match=words):
        read_adapter(path, **options)


@each(
    ("change", "words"),
    [
        (lambda s, key: s | {key: s[key] / 0}, "NaN or infinity"),
        (lambda s, key: s | {key: s[key].long()}, "of type torch.int64"),
        (lambda s, key: s | {key: s[key].to(torch.float8_e4m3fn)}, r"of type torch\.float8"),
        (lambda s, key: s | {key: s[key].to_sparse()}, "no dense tensor"),
        (lambda s, key: s | {key: s[key][0].clone()}, "a matrix is needed"),
        (lambda s, key: s | {key: s[key][:, :2].clone()}, r"ranks \[2, 4\]"),
        (lambda s, key: s | {key.replace("layer_0", "layer_7"): s[key]}, r"lora_a.* has no .*lora_b"),
        (lambda s, key: s | {"x": torch.zeros(2)}, "unknown tensors: x"),
        (lambda s, key: s | {5: s[key]}, "the name 5 is no text"),
        (lambda s, key: {"state": s}, "other things than tensors"),
        (
            lambda s, key: {
                n: torch.zeros(1).expand(
                    (len(t), 1 << 20) if ".a_tr" in n else (1 << 20, t.shape[1])
                )
                for n, t in s.items()
            },
            "bytes, and its tensors would take",  # one number is repeated a million times
        ),
    ],
)  # fmt: skip
def test_states_that_are_refused(pt, change, words):
    state = torch.load(pt, weights_only=True)
    wrong = pt.with_name("wrong.pt")
    torch.save(change(state, next(iter(state))), wrong)
    refused(wrong, words, alpha=1)


def test_several_adapters_are_refused(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"one": {"rank": 4}, "two": {"rank": 4}})
    refused(trained(checkpoint, tmp_path / "x.pt"), r"holds 2 adapters \(one, two\)")


def test_alphas_that_are_no_numbers(pt):
    for alpha in (float("nan"), float("inf"), -1, "16", 10**400):
        refused(pt, "a finite number of 0 or more", ConfigError, alpha=alpha)


def shorten(name, data):
    return data[:-4] if name.endswith("/data/0") else data


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_are_refused(pt):
    """What follows a record that is too short is not read as numbers."""
    with zipfile.ZipFile(pt) as archive:
        entries = [(e.filename, archive.read(e)) for e in archive.infolist()]
    again = next(entry for entry in entries if entry[0].endswith("/data/0"))
    for written, words in (
        (entries, None),
        ([(name, shorten(name, data)) for name, data in entries], "bytes that no record in it has"),
        ([*entries, again], "two entries of one name"),
    ):
        with zipfile.ZipFile(pt, "w") as archive:
            for entry in written:
                archive.writestr(*entry)
        refused(pt, words, alpha=1) if words else read_adapter(pt, alpha=1)
    pt.write_bytes(pt.read_bytes()[:-100])
    refused(pt, "cut off or damaged", alpha=1)


def test_verify_finds_a_flipped_bit(pt, rng):
    before = verify_adapter(pt, alpha=1).problems
    with zipfile.ZipFile(pt) as archive:
        entry = archive.getinfo(next(n for n in archive.namelist() if n.endswith("/data/0")))
        start = pt.read_bytes().index(archive.read(entry))
    data = bytearray(pt.read_bytes())
    data[start + int(rng.integers(entry.file_size)) // 4 * 4] ^= 1  # the last bit of a number
    pt.write_bytes(data)
    problems = verify_adapter(pt, alpha=1).problems
    assert len(problems) == len(before) + 1
    assert any("checksums do not fit" in problem for problem in problems)


def test_configs_next_to_a_file(make_checkpoint):
    """Which of two other adapters it is, nobody can know; and only LoRA is read."""
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4, "alpha": 2}})
    path = trained(checkpoint, checkpoint.folder / "x.pt")
    values = json.loads(checkpoint.config_path.read_text())
    entry = values["adapters"]["a"]
    for change, kind, words in (
        ({"num_layers": 10**9}, ConfigError, "num_layers is 1000000000"),
        ({"adapters": {"a": entry | {"rank": 5}}}, CheckpointError, "rank 4, and .* says 5"),
        (
            {"adapters": {"b": entry, "c": entry | {"alpha": 9}}},
            ConfigError,
            "the adapters b, c, and none is 'a'",
        ),
        (
            {"adapters": {"b": entry | {"__tamm_type__": "adapters:Other"}}},
            ConfigError,
            "of type 'adapters:Other'",
        ),
        ({"adapters": {"b": entry | {"alpha": 10**400}}}, ConfigError, "must be a number of 0 or more"),
    ):  # fmt: skip
        checkpoint.config_path.write_text(json.dumps(values | change))
        refused(path, words, kind)
    checkpoint.config_path.write_text(json.dumps(values | {"adapters": {"b": entry}}))
    assert read_adapter(path)[1].scale == 0.5


def test_files_that_can_not_be_written(draw_adapter, model_config, monkeypatch, tmp_path):
    def full(state, path):
        path.write_bytes(b"some")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "b-config.json").write_text("{}")
    tensors, config = draw_adapter(model_config)
    for name, model, words in (
        ("a", model_config, "is no name of one"),
        ("a.pt", None, "is not for Apple's 3B model"),
        ("b.pt", model_config, "exists already"),
        ("a.pt", model_config, r"a\.pt can't be written: .*unexpected pos"),
    ):
        with pytest.raises(AFMError, match=words):
            write_adapter(tmp_path / name, tensors, config, "toolkit", model_config=model)
    assert [path.name for path in tmp_path.iterdir()] == ["b-config.json"]

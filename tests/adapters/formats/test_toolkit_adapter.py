"""The toolkit's `.pt` files: tamm loads what is written, and computes what this package computes with it."""

import json
import zipfile

import mlx.core as mx
import pytest
import torch
from tamm.adapters import LoRAModelAdapter
from tamm.ao.arch_optimizers import KVQuantArchOptimizer
from tamm.models.afm_text import AFMTextV7
from tamm.utils import json as tamm_json

from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import pair_places
from afm_mlx.checkpoint.toolkit_keys import adapter_key
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.converters.adapter_conversion import verify_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_model
from tests.adapters.formats.conftest import assert_same_numbers
from tests.converters.conftest import DRAFT, SMALL
from tests.tools.compare import assert_close, error
from tests.tools.models import tamm_logits


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


def rewritten(path, change):
    """The archive again, with `change(name, data)` as the content of each entry."""
    with zipfile.ZipFile(path) as archive:
        entries = [(e.filename, archive.read(e)) for e in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, change(name, data))


def test_a_record_that_is_too_short(make_checkpoint, tmp_path):
    """What follows it in the file is not read as numbers."""
    path = trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")
    rewritten(path, lambda name, data: data)
    read_adapter(path, alpha=1)
    rewritten(path, lambda name, data: data[:-4] if name.endswith("/data/0") else data)
    with pytest.raises(CheckpointError, match="bytes that no record in it has"):
        read_adapter(path, alpha=1)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name(make_checkpoint, tmp_path):
    path = trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(next(n for n in archive.namelist() if n.endswith("/data/0")), b"1234")
    with pytest.raises(CheckpointError, match="two entries of one name"):
        read_adapter(path, alpha=1)


def test_verify_finds_a_flipped_bit(make_checkpoint, rng, tmp_path):
    path = trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")
    before = verify_adapter(path, alpha=1).problems
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(next(n for n in archive.namelist() if n.endswith("/data/0")))
        start = path.read_bytes().index(archive.read(entry))
    data = bytearray(path.read_bytes())
    data[start + int(rng.integers(entry.file_size)) // 4 * 4] ^= 1  # the last bit of a number
    path.write_bytes(data)
    problems = verify_adapter(path, alpha=1).problems
    assert len(problems) == len(before) + 1
    assert any("checksums do not fit" in problem for problem in problems)


def test_state_dicts_of_odd_things(make_checkpoint, tmp_path):
    path = trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")
    state = torch.load(path, weights_only=True)
    key = next(iter(state))
    for change, words in (
        ({5: state[key]}, "the name 5 is no text"),
        ({key.replace("layer_0", "layer_7"): state[key]}, r"lora_a.* is there without .*lora_b"),
        ({key: state[key].to(torch.float8_e4m3fn)}, r"of type torch\.float8"),
        ({key: state[key].to(torch.complex64)}, r"of type torch\.complex64"),
        ({key: state[key].to_sparse()}, "no dense tensor"),
    ):
        torch.save(state | change, path)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(path, alpha=1)


def test_a_config_that_fills_memory(make_checkpoint):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    path = trained(checkpoint, checkpoint.folder / "x.pt")
    values = json.loads(checkpoint.config_path.read_text())
    checkpoint.config_path.write_text(json.dumps(values | {"num_layers": 10**9}))
    with pytest.raises(ConfigError, match="num_layers is 1000000000"):
        read_adapter(path)


def test_bytes_that_claim_to_be_gigabytes(make_checkpoint, tmp_path):
    """A tensor may repeat one number a billion times."""
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    state = torch.load(trained(checkpoint, tmp_path / "x.pt"), weights_only=True)
    rank = 1 << 20
    state = {
        key: torch.zeros(1).expand((len(t), rank) if ".a_tr" in key else (rank, t.shape[1]))
        for key, t in state.items()
    }
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="bytes, and its tensors would take"):
        read_adapter(tmp_path / "x.pt", alpha=1)


def test_an_alpha_that_is_no_number(make_checkpoint, tmp_path):
    path = trained(make_checkpoint(adapters={"a": {"rank": 4}}), tmp_path / "x.pt")
    for alpha in (float("nan"), float("inf"), -1, "16", 10**400):
        with pytest.raises(ConfigError, match="a finite number of 0 or more"):
            read_adapter(path, alpha=alpha)


def test_a_config_of_other_adapters(make_checkpoint):
    """Which of two others it is, nobody can know; and only LoRA is read."""
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4, "alpha": 2}})
    path = trained(checkpoint, checkpoint.folder / "x.pt")
    values = json.loads(checkpoint.config_path.read_text())
    entry = values["adapters"].pop("a")
    for adapters, words in (
        ({"b": entry, "c": entry | {"alpha": 9}}, "the adapters b, c, and none is 'a'"),
        ({"b": entry | {"__tamm_type__": "adapters:Other"}}, "of type 'adapters:Other'"),
        ({"b": entry | {"alpha": 10**400}}, "must be a number of 0 or more"),
    ):
        checkpoint.config_path.write_text(json.dumps(values | {"adapters": adapters}))
        with pytest.raises(ConfigError, match=words):
            read_adapter(path)
    checkpoint.config_path.write_text(json.dumps(values | {"adapters": {"b": entry}}))
    assert read_adapter(path)[1].scale == 0.5


def test_a_full_disk(draw_adapter, model_config, monkeypatch, tmp_path):
    def full(state, path):
        path.write_bytes(b"some")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    tensors, config = draw_adapter(model_config)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(AFMError, match=r"a\.pt can't be written: .*unexpected pos"):
        write_adapter(tmp_path / "a.pt", tensors, config, "toolkit", model_config=model_config)
    assert list(tmp_path.iterdir()) == []


def test_a_config_of_another_run(make_checkpoint):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    path = trained(checkpoint, checkpoint.folder / "x.pt")
    values = json.loads(checkpoint.config_path.read_text())
    values["adapters"]["a"]["rank"] = 5
    checkpoint.config_path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="rank 4, and the config beside it says 5"):
        read_adapter(path)

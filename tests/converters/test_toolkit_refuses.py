"""Sources that are damaged, unsafe, or not what they say: one clear error, and nothing is written."""

import json
import os
import pickle
import sys
import zipfile

import pytest
import torch

from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, TokenizerError
from tests.converters.conftest import DRAFT


@pytest.fixture
def refuses(tmp_path, listing):
    """A function that converts and expects an error with all of `words`, and no trace on the disk."""

    def check(source, *words, kind=CheckpointError, **options):
        before = listing(tmp_path)
        with pytest.raises(kind) as caught:
            convert(source, tmp_path / "out", **options)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message
        assert listing(tmp_path) == before

    return check


class Runs:
    def __reduce__(self):
        return os.system, ("echo this ran >&2",)


def change_config(checkpoint, **values):
    content = json.loads(checkpoint.config_path.read_text()) | values
    checkpoint.config_path.write_text(json.dumps(content))


def test_code_in_the_pickle(make_checkpoint, refuses, capfd):
    checkpoint = make_checkpoint()
    torch.save({"embedding.weight": torch.zeros(2), "x": Runs()}, checkpoint.weights)
    refuses(checkpoint.folder, "base-model.pt", "run code")
    checkpoint.weights.write_bytes(pickle.dumps(Runs()))
    refuses(checkpoint.folder, "base-model.pt", "pickle")
    assert "this ran" not in capfd.readouterr().err


def test_the_format_before_zip(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    state = torch.load(checkpoint.weights, weights_only=True)
    torch.save(state, checkpoint.weights, _use_new_zipfile_serialization=False)
    refuses(checkpoint.folder, "base-model.pt", "only the zip format")


def test_a_damaged_file(make_checkpoint, refuses, rng):
    checkpoint = make_checkpoint()
    data = checkpoint.weights.read_bytes()
    for keep in (0.0, 0.3, 0.9, 0.999):
        checkpoint.weights.write_bytes(data[: int(len(data) * keep)])
        refuses(checkpoint.folder, "base-model.pt")
    start, junk = data.index(b"data.pkl") + 200, rng.integers(0, 256, 400, dtype="uint8").tobytes()
    checkpoint.weights.write_bytes(data[:start] + junk + data[start + 400 :])
    refuses(checkpoint.folder, "base-model.pt")


def test_other_files(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    checkpoint.weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    refuses(checkpoint.folder, "base-model.pt", "no PyTorch checkpoint", "b'vers'")
    with zipfile.ZipFile(checkpoint.weights, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refuses(checkpoint.folder, "no data.pkl")


def test_a_compressed_zip(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    with zipfile.ZipFile(checkpoint.weights) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(checkpoint.weights, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    refuses(checkpoint.folder, "compression")


def test_no_state_dict(make_checkpoint, refuses):
    checkpoint, zeros = make_checkpoint(), torch.zeros(2)
    for content in ([zeros], {"model": {"a": zeros}}, {"epoch": 3}, {}, zeros):
        torch.save(content, checkpoint.weights)
        refuses(checkpoint.folder, "base-model.pt", "state")


def test_without_torch(make_checkpoint, refuses, monkeypatch):
    checkpoint = make_checkpoint()
    monkeypatch.setitem(sys.modules, "torch", None)
    refuses(checkpoint.folder, "pip install 'afm-mlx[convert]'", kind=AFMError)


@pytest.fixture
def refuses_states(make_checkpoint, refuses):
    """A function that refuses changes of a checkpoint's state dict, each on its own."""

    def check(*cases):
        checkpoint = make_checkpoint()
        whole = checkpoint.weights.read_bytes()
        for change, *words in cases:
            checkpoint.weights.write_bytes(whole)
            state = torch.load(checkpoint.weights, weights_only=True)
            change(state)
            torch.save(state, checkpoint.weights)
            refuses(checkpoint.folder, *words)

    return check


def other_head(state):
    state["output_transform.weight"] = state["output_transform.weight"].clone()
    state["output_transform.weight"][-1, -1] += 1


def test_tensors_of_another_model(refuses_states):
    bias = "layers.segment_0.layer_0.attention.bias"
    norm, name = "output_norm.weight", "model.output_norm.weight"
    refuses_states(
        (lambda s: s.update({bias: torch.zeros(2)}), "unknown", bias),
        (lambda s: s.pop(norm), "missing", name),
        (lambda s: s.update({norm: torch.zeros(3)}), f"{name} is [3] and must be [64]"),
        (lambda s: s.update({norm: torch.ones(64, dtype=torch.int32)}), norm, "int32"),
        (
            lambda s: s.update({"model.embedding.weight": s["embedding.weight"]}),
            "both mean model.embedding.weight",
        ),
        (other_head, "output_transform.weight", "own head"),
        (
            lambda s: s.update({"output_transform.weight": torch.zeros(2, 2)}),
            "output_transform.weight [2, 2]",
        ),
        *(
            (lambda s, v=v: s["embedding.weight"][-1, 3].fill_(v), "embedding.weight", "NaN or")
            for v in (float("nan"), float("inf"))
        ),
    )


def test_more_blocks_than_the_config_has(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    change_config(checkpoint, num_layers=4)
    refuses(checkpoint.folder, "unexpected", "model.layers.2.")


def test_a_number_too_large_for_float16(make_checkpoint, refuses, edit_state):
    checkpoint = make_checkpoint()
    edit_state(checkpoint, lambda s: s["output_norm.weight"][5].fill_(-70000) is None)
    refuses(checkpoint.folder, "output_norm.weight", "7e+04", "bfloat16", dtype="float16")


RANGE = "layers.segment_0.layer_1.attention.kv_quantizer.value_quantizer.activation_post_process"


def test_ranges_that_were_never_observed(make_checkpoint, refuses):
    refuses(make_checkpoint(observe=False).folder, "has not observed any data")


def test_ranges_that_give_no_scale(refuses_states):
    def with_range(values):
        return lambda state: state.update({f"{RANGE}.range": torch.tensor(values)})

    inf, nan = float("inf"), float("nan")
    pairs = ([inf, -inf], [0.0, nan], [1.0, -1.0], [0.0, 0.0])
    refuses_states(
        *((with_range(pair), f"{RANGE}.range", "no scale") for pair in pairs),
        (with_range([0.0] * 3), f"{RANGE}.range", "must be [2]"),
        (lambda s: s.pop(f"{RANGE}.range"), f"{RANGE}.num_samples stands alone"),
    )


def test_ranges_that_the_config_does_not_know(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    change_config(checkpoint, arch_optimizers=None)
    refuses(checkpoint.folder, "KVQuantArchOptimizer")


def test_a_config_with_ranges_that_the_checkpoint_lacks(make_checkpoint, refuses):
    checkpoint = make_checkpoint(kv_quant=False)
    change_config(checkpoint, arch_optimizers={"kv": {"__tamm_type__": "ao:KVQuantArchOptimizer"}})
    refuses(checkpoint.folder, "missing", "quant_key_scale")


def test_configs(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    content = json.loads(checkpoint.config_path.read_text())
    low_rank = {"__tamm_type__": "ao:LowRankEmbeddingsSVD"}
    kv = {"__tamm_type__": "ao:KVQuantArchOptimizer", "skip_quantize_for_first_token": True}
    for values, *words in (
        ({"__tamm_type__": "models:AFMParallelTrackMoEConfig"}, "AFMTextV7Config"),
        ({"attention_window": 3}, "unknown keys attention_window"),
        ({"num_heads": 5}, "num_heads", "hidden_dim"),
        ({"hidden_dim": "64"}, "hidden_dim"),
        ({"adapters": ["a"]}, "adapters"),
        ({"arch_optimizers": {"svd": low_rank}}, "svd", "LowRankEmbeddingsSVD"),
        ({"arch_optimizers": {"kv": kv}}, "skip_quantize_for_first_token"),
    ):
        checkpoint.config_path.write_text(json.dumps(content | values))
        refuses(checkpoint.folder, str(checkpoint.config_path), *words, kind=ConfigError)


def test_adapters_that_do_not_fit(make_checkpoint, refuses, edit_state):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4, "alpha": 2}})
    lora = {"__tamm_type__": "adapters:LoRAModelAdapter", "rank": 8}
    change_config(checkpoint, adapters={"a": lora})
    refuses(checkpoint.folder, "adapter 'a'", "wrong shape", "must be [64, 8]")
    change_config(checkpoint, adapters=None)
    refuses(checkpoint.folder, "adapter 'a'", "not in the model's config")
    change_config(checkpoint, adapters={"a": {"__tamm_type__": "adapters:Other"}})
    refuses(checkpoint.folder, "adapter 'a'", "adapters:Other")
    change_config(checkpoint, adapters={"a": lora | {"rank": 0}})
    refuses(checkpoint.folder, "adapter 'a'", "rank is 0", kind=ConfigError)
    change_config(checkpoint, adapters={"a": lora | {"rank": 4, "alpha": "2"}})
    refuses(checkpoint.folder, "adapter 'a'", "alpha is '2'", kind=ConfigError)
    change_config(checkpoint, adapters={"a": lora | {"rank": 4}})
    half = "layers.segment_1.layer_0.attention.q_transform.adapters.a.b_transpose"
    edit_state(checkpoint, lambda s: s.pop(half) is None)
    refuses(checkpoint.folder, "missing", "model.kv_reuse_layers.0.self_attn.q_proj.lora_b")


def test_an_adapter_id_that_is_no_folder_name(make_checkpoint, refuses):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    state = torch.load(checkpoint.weights, weights_only=True)
    for name in ("x/../../../y", "/etc/y", "-rf", "a b"):
        renamed = {k.replace("adapters.a.", f"adapters.{name}."): v for k, v in state.items()}
        torch.save(renamed, checkpoint.weights)
        refuses(checkpoint.folder, "base-model.pt", name)


def test_adapters_alone(make_checkpoint, refuses, edit_state):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    edit_state(checkpoint, lambda s: {k: v for k, v in s.items() if "adapters" in k})
    refuses(checkpoint.folder, "no base model")


def test_a_tokenizer_with_more_pieces_than_rows(make_checkpoint, refuses):
    checkpoint = make_checkpoint(shape=DRAFT | {"vocab_size": 200}, kv_quant=False)
    refuses(checkpoint.folder, "tokenizer.model", "200 rows")


def test_a_tokenizer_that_is_missing_or_none(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    (checkpoint.folder / "tokenizer.model").write_bytes(b"not a model")
    refuses(checkpoint.folder, "tokenizer.model", kind=TokenizerError)
    (checkpoint.folder / "tokenizer.model").unlink()
    refuses(checkpoint.folder, "tokenizer.model is missing")


def test_which_file_of_a_folder(make_checkpoint, refuses):
    checkpoint = make_checkpoint(name="one")
    make_checkpoint(name="two")
    refuses(checkpoint.folder, "2 .pt files", "one.pt, two.pt")
    checkpoint.config_path.unlink()
    refuses(checkpoint.weights, "one-config.json")


def test_a_folder_of_the_toolkit_gives_its_base_model(make_checkpoint, tmp_path):
    make_checkpoint(name="draft-model", shape=DRAFT, kv_quant=False)
    checkpoint = make_checkpoint(name="base-model")
    folder = convert(checkpoint.folder, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["num_kv_reuse_layers"] == 2

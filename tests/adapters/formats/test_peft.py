"""PEFT's folders: what it writes is read, and what is written it loads, with the same change of every layer."""

import dataclasses
import json
import warnings
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import layer_of, pair_targets
from afm_mlx.errors import CheckpointError, ConfigError
from tests.adapters.formats.conftest import assert_same_numbers, delta
from tests.tools.cases import all_pairs, each
from tests.tools.compare import assert_close


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def layer_name(place, qkv):
    """The layer of a place, with queries, keys and values fused or split."""
    if place.part and qkv == "split":
        return place.layer.replace("qkv", "qkv"[int(place.part[1])])
    return place.layer


def torch_model(config, qkv):
    model, outputs = torch.nn.Module(), Counter()
    for place in pair_targets(config):
        name = layer_name(place, qkv)
        outputs[name] += place.outputs
        owner, (*parents, leaf) = model, name.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                setattr(owner, parent, torch.nn.Module())
            owner = getattr(owner, parent)
        setattr(owner, leaf, torch.nn.Linear(place.inputs, outputs[name], bias=False))
    return model


def peft_deltas(model, places, qkv):
    """The change of each place's weight (inputs, outputs), by PEFT."""
    found, starts = {}, {}
    modules = dict(model.base_model.model.named_modules())
    for place in places:
        name = layer_name(place, qkv)
        if hasattr(modules[name], "get_delta_weight"):
            start = starts.get(name, 0)
            starts[name] = start + place.outputs
            whole = modules[name].get_delta_weight("default").detach().double().numpy().T
            found[place] = whole[:, start : start + place.outputs]
    return found


def check(ours, config, theirs):
    assert theirs
    for place, wanted in theirs.items():  # in float32
        assert_close(delta(ours, config, place), wanted, 1e-5, place, least=1)


@pytest.mark.parametrize(("qkv", "partial"), [("fused", True), ("split", False)])
def test_peft_loads_what_is_written(peft, qkv, partial, draw_adapter, model_config, rng, tmp_path):
    keep = (lambda p: p.part != ".1" and "out_proj" not in p.layer) if partial else None
    tensors, config = draw_adapter(
        model_config, int(rng.integers(1, 9)), float(rng.uniform(0.1, 4)), mx.float32, keep
    )
    write_adapter(tmp_path / "a", tensors, config, "peft", model_config=model_config, qkv=qkv)
    with warnings.catch_warnings():
        # PEFT only warns of tensors without a layer, and of layers without tensors.
        warnings.simplefilter("error", UserWarning)
        model = peft.PeftModel.from_pretrained(torch_model(model_config, qkv), str(tmp_path / "a"))
    theirs = peft_deltas(model, pair_targets(model_config), qkv)
    adapted = {place for place in theirs if np.abs(theirs[place]).max() > 0}
    assert adapted == {p for p in pair_targets(model_config) if keep is None or keep(p)}
    check(tensors, config, {p: theirs[p] for p in adapted})


def test_a_shared_a_needs_no_more_rank(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config)
    for name in list(tensors):
        if ".lora_a." in name:
            tensors[name] = tensors[f"{layer_of(name)}.lora_a.0"]
    write_adapter(tmp_path / "a", tensors, config, "peft")
    values = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert values["rank_pattern"] == {}
    found, found_config = read_adapter(tmp_path / "a")
    assert_same_numbers(found, tensors)
    assert found_config == dataclasses.replace(config, num_layers=-1)


@pytest.mark.parametrize(
    ("qkv", "rs", "patterns"), all_pairs(("fused", "split"), (False, True), (False, True))
)
def test_what_peft_writes_is_read(peft, qkv, rs, patterns, model_config, rng, tmp_path):
    rank, alpha = int(rng.integers(1, 9)), int(rng.integers(1, 33))
    options = {}
    if patterns:
        options = {
            "rank_pattern": {"up_proj": 2 * rank, r"^model\.layers\.0\.mlp\.down_proj": 3 * rank},
            "alpha_pattern": {r"layers\.\d\.self_attn\.out_proj": alpha / 3, "up_proj": 7},
        }
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        use_rslora=rs,
        init_lora_weights=False,
        lora_dropout=0.1,
        target_modules=["qkv_proj", "q_proj", "v_proj", "out_proj", "up_proj", "down_proj"],
        **options,
    )
    model = peft.get_peft_model(torch_model(model_config, qkv), settings)
    model.save_pretrained(str(tmp_path / "a"))
    tensors, config = read_adapter(tmp_path / "a", model_config)
    assert config.dropout == 0.1
    assert not any("gate_proj" in name for name in tensors)
    if not patterns:
        assert config.rank == rank
        assert config.scale == alpha / (rank**0.5 if rs else rank)
    theirs = peft_deltas(model, pair_targets(model_config), qkv)
    check(tensors, config, theirs)
    assert {n for p in theirs for n in (p.a, p.b)} == set(tensors)


@pytest.fixture
def folder(draw_adapter, model_config, tmp_path):
    write_adapter(tmp_path / "a", *draw_adapter(model_config), "peft")
    return tmp_path / "a"


@pytest.fixture
def edit_tensors(folder):
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)

    def edit(change):
        tensors = change(stored)
        # PyTorch's writer takes no tensors that share memory.
        save_file(
            {n: torch.empty(t.shape, dtype=t.dtype).copy_(t) for n, t in tensors.items()}, path
        )

    return edit


@pytest.fixture
def edit_config(folder):
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    return lambda change: path.write_text(json.dumps(values | change))


def test_options_without_effect(folder, edit_config):
    wanted, config = read_adapter(folder)
    edit_config({
        "target_modules": r".*\.(up|down)_proj", "layers_to_transform": [0], "layers_pattern": "layers",
        "init_lora_weights": "gaussian", "something_new": None,
    })  # fmt: skip
    found, found_config = read_adapter(folder)
    assert_same_numbers(found, wanted)
    assert found_config == config


@each(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora is True; DoRA can't be"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "replicated layers"),
        ({"use_something_new": True}, "'use_something_new', which is unknown here"),
        ({"peft_type": None}, "peft_type is None"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": 10**400}, "a whole number of 1 to 65536"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"lora_dropout": 1}, "lora_dropout is 1"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"up_proj": 0}}, "rank_pattern is"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern is"),
        # Patterns that take exponential time, or a great many of them.
        ({"rank_pattern": {"(a+)+": 4}}, "simple patterns of layers"),
        ({"rank_pattern": {"a?" * 30 + "a" * 30: 4}}, "simple patterns of layers"),
        ({"rank_pattern": {"(.|.)" * 30: 4}}, "simple patterns of layers"),
        ({"rank_pattern": {"a" * 201: 4}}, "simple patterns of layers"),
        ({"alpha_pattern": {str(n): 4 for n in range(2001)}}, "simple patterns of layers"),
    ],
)
def test_configs_that_are_refused(folder, edit_config, change, words):
    edit_config(change)
    with pytest.raises(ConfigError, match=words):
        read_adapter(folder)


START = "base_model.model.model."
DOWN = f"{START}layers.0.mlp.down_proj.lora_A.weight"
QKV = f"{START}layers.0.self_attn.qkv_proj.lora_"


@each(
    ("change", "words"),
    [
        (lambda t: {n: t[n] for n in t if n != DOWN}, "one matrix of"),
        (lambda t: {}, "holds no tensors"),
        (lambda t: t | {DOWN: t[DOWN][:-1]}, "and rank 4 needs"),
        (lambda t: t | {DOWN: t[DOWN][0]}, "and rank 4 needs"),
        (lambda t: t | {DOWN: t[DOWN] / 0}, "NaN"),
        (lambda t: t | {DOWN: t[DOWN].int()}, "is no matrix of a LoRA pair"),
        (
            lambda t: t | {DOWN.replace("lora_A", "lora_magnitude_vector"): t[DOWN][0]},
            "magnitude_vector.* is no matrix",
        ),
        (lambda t: t | {f"{START}embedding.weight": t[DOWN]}, r"embedding\.weight .* is no matrix"),
        (
            lambda t: {n.replace("down_proj", "w2"): t[n] for n in t},
            "no LoRA tensor of an AFM model|the model has no layer",
        ),
        (lambda t: t | {DOWN.removeprefix(START): t[DOWN]}, "two tensors are lora_A of"),
        (
            lambda t: t | {n.replace("qkv", "q"): t[n] for n in t if QKV in n},
            r"0\.self_attn\.q_proj and of .*0\.self_attn\.qkv_proj",
        ),
        (lambda t: t | {f"{QKV}B.weight": t[f"{QKV}B.weight"][:-1]}, "must share the rest evenly"),
    ],
)
def test_tensors_that_are_refused(folder, edit_tensors, model_config, change, words):
    edit_tensors(change)
    with pytest.raises(CheckpointError, match=words):
        read_adapter(folder, model_config)


def test_filling_up_ranks_is_bounded(folder, edit_tensors, edit_config):
    """One pair of a huge rank does not make all the others as large."""
    tensors = {}
    for i in range(401):
        name, rank = f"model.layers.{i}.mlp.up_proj", 500 if i == 400 else 1
        tensors[f"{name}.lora_A.weight"] = torch.ones(rank, 4)
        tensors[f"{name}.lora_B.weight"] = torch.ones(4, rank)
    edit_tensors(lambda _: tensors)
    edit_config({"r": 1, "rank_pattern": {"400.mlp.up_proj": 500}})
    with pytest.raises(CheckpointError, match=r"ranks 1 to 500.* times as large"):
        read_adapter(folder)


def test_patterns_are_of_the_names_that_were_trained(folder, edit_tensors, edit_config):
    """A model that was saved without `model.` has patterns without it."""
    edit_tensors(lambda t: {n.replace(START, "base_model.model."): t[n] for n in t})
    wanted, config = read_adapter(folder)
    name = "model.layers.0.mlp.up_proj.lora_b"
    values = json.loads((folder / "adapter_config.json").read_text())
    change = {r"^layers\.0\.mlp\.up_proj": values["lora_alpha"] / 2}
    edit_config({"alpha_pattern": values["alpha_pattern"] | change})
    found, found_config = read_adapter(folder)
    assert found_config.scale == config.scale
    assert_same_numbers(found, wanted | {name: wanted[name].astype(mx.float32) * 0.5})


def test_names_without_prefixes(folder, edit_tensors):
    """Some trainers save the model's own names, or the adapter's name in them."""
    wanted, _ = read_adapter(folder)
    edit_tensors(lambda t: {n.replace(".weight", ".default.weight"): t[n] for n in t})
    assert_same_numbers(read_adapter(folder)[0], wanted)
    edit_tensors(lambda t: {n.removeprefix(START): t[n] for n in t})
    assert_same_numbers(read_adapter(folder)[0], wanted)


def test_pickles_are_not_read(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle that could run code"):
        read_adapter(folder)


def test_a_fused_layer_needs_its_widths(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, keep=lambda p: p.part == ".0")
    with pytest.raises(CheckpointError, match="has pairs for 1 of queries, keys and values"):
        write_adapter(tmp_path / "a", tensors, config, "peft")
    write_adapter(tmp_path / "a", tensors, config, "peft", qkv="split")
    assert_same_numbers(read_adapter(tmp_path / "a")[0], tensors)

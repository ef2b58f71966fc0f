"""PEFT's folders: what it writes is read, and what is written it loads, with the same change of every layer."""

import json
import warnings

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import layer_of, pair_places
from afm_mlx.errors import CheckpointError, ConfigError
from tests.adapters.formats.conftest import assert_same_numbers, delta
from tests.tools.cases import all_pairs
from tests.tools.compare import assert_close


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


class Layers(torch.nn.Module):
    """A module with a linear layer of each name, and nothing that runs."""

    def __init__(self, shapes):
        super().__init__()
        for name, (inputs, outputs) in shapes.items():
            owner, (*parents, leaf) = self, name.split(".")
            for parent in parents:
                if not hasattr(owner, parent):
                    setattr(owner, parent, torch.nn.Module())
                owner = getattr(owner, parent)
            setattr(owner, leaf, torch.nn.Linear(inputs, outputs, bias=False))


def torch_model(config, qkv):
    """AFM's linear layers in PyTorch, with queries, keys and values fused or split."""
    shapes = {}
    for place in pair_places(config):
        name = place.layer
        if place.part and qkv == "split":
            name = name.replace("qkv", "qkv"[int(place.part[1])])
        inputs, outputs = shapes.get(name, (place.inputs, 0))
        shapes[name] = (inputs, outputs + place.outputs)
    return Layers(shapes)


def peft_deltas(model, places, qkv):
    """The change of each place's weight (inputs, outputs), by PEFT."""
    found, starts = {}, {}
    modules = dict(model.base_model.model.named_modules())
    for place in places:
        name = place.layer
        if place.part and qkv == "split":
            name = name.replace("qkv", "qkv"[int(place.part[1])])
        module = modules[name]
        if not hasattr(module, "get_delta_weight"):
            continue
        start = starts.get(name, 0)
        starts[name] = start + place.outputs
        whole = module.get_delta_weight("default").detach().double().numpy().T
        found[place] = whole[:, start : start + place.outputs]
    return found


def check(ours, config, theirs, tolerance=1e-5):
    """PEFT computes in float32."""
    assert theirs
    for place, wanted in theirs.items():
        assert_close(delta(ours, config, place), wanted, tolerance, place, least=1)


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
    theirs = peft_deltas(model, pair_places(model_config), qkv)
    adapted = {place for place in theirs if np.abs(theirs[place]).max() > 0}
    assert adapted == {p for p in pair_places(model_config) if keep is None or keep(p)}
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
    assert found_config == config.__class__(**{**vars(config), "num_layers": -1})


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
    theirs = peft_deltas(model, pair_places(model_config), qkv)
    check(tensors, config, theirs)
    assert {n for p in theirs for n in (p.a, p.b)} == set(tensors)


@pytest.fixture
def folder(draw_adapter, model_config, tmp_path):
    write_adapter(tmp_path / "a", *draw_adapter(model_config), "peft")
    return tmp_path / "a"


def test_options_without_effect(folder):
    """Which layers there are, the tensors say."""
    wanted = read_adapter(folder)
    edit_config(
        folder,
        {
            "target_modules": r".*\.(up|down)_proj",
            "layers_to_transform": [0],
            "layers_pattern": "layers",
            "exclude_modules": ["embedding"],
            "init_lora_weights": "gaussian",
            "something_new": None,
        },
    )
    found = read_adapter(folder)
    assert_same_numbers(found[0], wanted[0])
    assert found[1] == wanted[1]


def edit_config(folder, change):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_configs_that_are_refused(folder):
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora is True; DoRA can't be"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["embedding"]}, "modules_to_save is"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"fan_in_fan_out": True}, "transposed base layers"),
        ({"lora_bias": True}, "a bias of B"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"trainable_token_indices": [5]}, "trained tokens"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "replicated layers"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"use_something_new": True}, "'use_something_new', which is unknown here"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern is"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern is"),
        # Patterns that take exponential time, or a great many of them.
        ({"rank_pattern": {"a?" * 30 + "a" * 30: 4}}, "simple patterns of layers"),
        ({"rank_pattern": {"(.|.)" * 30: 4}}, "simple patterns of layers"),
        ({"alpha_pattern": {str(n): 4 for n in range(2001)}}, "simple patterns of layers"),
        # Larger than any float.
        ({"r": 10**400}, "a whole number of 1 to 65536"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern is"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern is"),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match=words):
            read_adapter(folder)


EMBEDDING = "base_model.model.model.embedding"


def test_tensors_that_are_refused(folder, model_config):
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    for change, words in (
        (lambda t, n: t.pop(n), "one matrix of"),
        (lambda t, n: t.clear(), "holds no tensors"),
        (lambda t, n: t.update({n: t[n][:-1].clone()}), "and rank 4 needs"),
        (lambda t, n: t.update({n: t[n][0].clone()}), "and rank 4 needs"),
        (lambda t, n: t.update({n: torch.zeros_like(t[n]) / 0}), "NaN"),
        (lambda t, n: t.update({n: t[n].int()}), "is no matrix of a LoRA pair"),
        (
            lambda t, n: t.update({n.replace("lora_A", "lora_magnitude_vector"): t[n][0].clone()}),
            "magnitude_vector.* is no matrix",
        ),
        (
            lambda t, n: t.update({f"{EMBEDDING}.lora_embedding_A": t[n].clone()}),
            "lora_embedding_A .* is no matrix",
        ),
        (
            lambda t, n: t.update({f"{EMBEDDING}.weight": t[n].clone()}),
            r"embedding\.weight .* is no matrix",
        ),
        (
            lambda t, n: t.update({k.replace("down_proj", "w2"): t.pop(k) for k in list(t)}),
            "no LoRA tensor of an AFM model|the model has no layer",
        ),
    ):
        path.write_bytes(whole)
        tensors = load_file(path)
        change(tensors, "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight")
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(folder, model_config)


def test_queries_both_fused_and_alone(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    layer = "base_model.model.model.layers.0.self_attn"
    width = tensors[f"{layer}.qkv_proj.lora_A.weight"].shape[1]
    tensors[f"{layer}.q_proj.lora_A.weight"] = torch.ones(4, width)
    tensors[f"{layer}.q_proj.lora_B.weight"] = torch.ones(width, 4)
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"0\.self_attn\.q_proj and of .*0\.self_attn\.qkv_proj"
    ):
        read_adapter(folder)


def test_filling_up_ranks_is_bounded(folder):
    """One pair of a huge rank does not make all the others as large."""
    path = folder / "adapter_model.safetensors"
    tensors = {
        f"model.layers.{i}.mlp.up_proj.lora_{side}.weight": torch.ones(shape)
        for i in range(400)
        for side, shape in (("A", (1, 4)), ("B", (4, 1)))
    }
    tensors["model.layers.400.mlp.up_proj.lora_A.weight"] = torch.ones(500, 4)
    tensors["model.layers.400.mlp.up_proj.lora_B.weight"] = torch.ones(4, 500)
    save_file(tensors, path)
    edit_config(folder, {"r": 1, "rank_pattern": {"400.mlp.up_proj": 500}})
    with pytest.raises(CheckpointError, match=r"ranks 1 to 500.* times as large"):
        read_adapter(folder)


def test_patterns_are_of_the_names_that_were_trained(folder):
    """A model that was saved without `model.` has patterns without it."""
    path = folder / "adapter_model.safetensors"
    names = {n: n.replace("base_model.model.model.", "base_model.model.") for n in load_file(path)}
    save_file({names[n]: t for n, t in load_file(path).items()}, path)
    wanted, config = read_adapter(folder)
    name = "model.layers.0.mlp.up_proj.lora_b"
    values = json.loads((folder / "adapter_config.json").read_text())
    change = {r"^layers\.0\.mlp\.up_proj": values["lora_alpha"] / 2}
    edit_config(folder, {"alpha_pattern": values["alpha_pattern"] | change})
    found, found_config = read_adapter(folder)
    assert found_config.scale == config.scale
    assert_same_numbers(found, wanted | {name: wanted[name].astype(mx.float32) * 0.5})


def test_names_without_prefixes(folder, draw_adapter, model_config):
    """Some trainers save the model's own names, or the adapter's name in them."""
    wanted, _ = read_adapter(folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for start, end in (("", ".weight"), ("base_model.model.model.", ".default.weight")):
        names = (n.removeprefix("base_model.model.model.").removesuffix(".weight") for n in tensors)
        save_file(
            {f"{start}{n}{end}": t for n, t in zip(names, tensors.values(), strict=True)}, path
        )
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

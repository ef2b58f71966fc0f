"""The parts of split layers are the layers."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.safetensors_file import StoredTensor, read_header
from afm_mlx.converters.convert import convert
from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.model.model import Model
from afm_mlx.model.split_layers import (
    best_token,
    joined_logits,
    keep_inputs,
    keep_outputs,
    keep_vocabulary,
)
from afm_mlx.model.split_model import split_model, split_problem
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.ranks import Ranks
from afm_mlx.track_config import TrackConfig
from tests.tools.cases import each
from tests.tools.cli import CONFIG, write_folder
from tests.tools.compare import assert_close
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.zoo import word_tokenizer_json, zoo_model

OUTPUTS, INPUTS = 24, 64


class Group:
    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def parts(make, size, cut):
    """A layer cut for each rank."""
    made = [make() for _ in range(size)]
    for rank, layer in enumerate(made):
        cut(layer, Group(rank, size))
    return made


@pytest.fixture
def alone(monkeypatch):
    """Exchanges that return a rank's own part."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: x)


def packed(kind, rng, bias=False):
    codes = mx.array(rng.integers(0, 16, (OUTPUTS, INPUTS)))

    def floats(*shape):
        return mx.array(rng.uniform(0.5, 1.5, shape).astype(np.float32))

    options = {"bias": floats(OUTPUTS)} if bias else {}
    if kind == "tensor":
        return PackedLinear.from_codes(codes, 4, scales=floats(), **options)
    if kind == "row":
        return PackedLinear.from_codes(codes, 4, scales=floats(OUTPUTS), **options)
    if kind == "group":
        return PackedLinear.from_codes(codes, 4, scales=floats(OUTPUTS, 4), **options)
    if kind == "affine":
        scales, biases = floats(OUTPUTS, 2), floats(OUTPUTS, 2)
        return PackedLinear.from_codes(codes, 4, "affine", scales=scales, biases=biases, **options)
    tables = 1 if kind == "table" else 6
    return PackedLinear.from_codes(codes, 4, "palette", table=floats(tables, 16), **options)


def linear(kind, rng):
    layer = nn.Linear(INPUTS, OUTPUTS)
    return layer if kind == "float" else nn.QuantizedLinear.from_linear(layer, 32, 3)


KINDS = ["tensor", "row", "group", "affine", "table", "tables", "float", "mlx"]


def layer_of(kind, rng, bias=True):
    return linear(kind, rng) if kind in ("float", "mlx") else packed(kind, rng, bias)


def copies(kind, rng):
    state = rng.bit_generator.state

    def make():
        rng.bit_generator.state = state
        mx.random.seed(1)
        return layer_of(kind, rng)

    return make


@each("kind", KINDS)
def test_parts_of_the_outputs_are_the_product(kind, rng):
    make = copies(kind, rng)
    x = mx.array(rng.standard_normal((3, INPUTS)).astype(np.float32))
    whole = make()(x)
    ranges = {0: [(0, 8), (16, 20)], 1: [(8, 16), (20, 24)]}
    found = [
        layer(x)
        for layer in parts(
            make, 2, lambda each, group: keep_outputs(each, ranges[group.rank()], "x")
        )
    ]
    order = mx.array([*range(8), *range(16, 20), *range(8, 16), *range(20, 24)])
    assert_close(mx.concatenate(found, axis=-1), whole[:, order], 1e-5)


@each("kind", KINDS)
def test_parts_of_the_inputs_add_up(kind, rng, alone):
    make = copies(kind, rng)
    x = mx.array(rng.standard_normal((3, INPUTS)).astype(np.float32))
    whole = make()(x)
    made = parts(make, 2, lambda each, group: keep_inputs(each, group, "x"))
    found = [layer(x[:, 32 * rank : 32 * (rank + 1)]) for rank, layer in enumerate(made)]
    both = found[0] + found[1]
    if kind not in ("float", "mlx"):  # every rank has the bias, which is added to the sum
        both = both - made[1]["bias"]
    assert_close(both, whole, 1e-4)


def test_what_can_not_be_split_names_the_layer(rng):
    with pytest.raises(
        ConfigError, match=r"down has 64 inputs, stored as 4 scales .* which 8 ranks"
    ):
        keep_inputs(packed("group", rng), Group(0, 8), "down")
    with pytest.raises(ConfigError, match=r"down has 64 inputs, stored as 8 words of codes"):
        keep_inputs(packed("row", rng), Group(0, 16), "down")
    with pytest.raises(ConfigError, match="gate has a table for each 4 of its 24 outputs"):
        keep_outputs(packed("tables", rng), [(0, 6)], "gate")


@each("rows", [48, 47])
@each("is_packed", [True, False])
def test_parts_of_a_vocabulary(rng, monkeypatch, rows, is_packed):
    weights = mx.array(rng.integers(0, 16, (rows, 32)))
    scales = mx.array(rng.uniform(0.5, 1.5, rows).astype(np.float32))

    def make():
        if is_packed:
            return PackedEmbedding.from_codes(weights, 4, scales=scales)
        embedding = nn.Embedding(rows, 32)
        embedding.weight = weights.astype(mx.float32) - 7
        return embedding

    whole, x = make(), mx.array(rng.standard_normal((2, 3, 32)).astype(np.float32))
    made = parts(make, 5, keep_vocabulary)
    tokens = mx.array([[0, rows - 1, 9], [10, 20, 30]])
    monkeypatch.setattr(mx.distributed, "all_sum", lambda each, group: each)
    assert_close(sum(each(tokens) for each in made), whole(tokens), 1e-6)
    logits = whole.as_linear(x)
    own = [type(each).__base__.as_linear(each, x) for each in made]

    def gathered(part, group):
        if part.dtype == mx.uint32:
            return mx.stack([mx.stack([t, v.view(mx.uint32)]) for t, v in best])
        pads = [made[0].vocabulary.share - each.shape[-1] for each in own]
        return mx.stack(
            [
                mx.pad(each, [(0, 0), (0, 0), (0, pad)], constant_values=-np.inf)
                for each, pad in zip(own, pads, strict=True)
            ]
        )

    best = [
        (mx.argmax(e, axis=-1).astype(mx.uint32) + layer.vocabulary.start, mx.max(e, axis=-1))
        for e, layer in zip(own, made, strict=True)
    ]
    monkeypatch.setattr(mx.distributed, "all_gather", gathered)
    for layer, each_own in zip(made, own, strict=True):
        assert_close(joined_logits(layer, each_own), logits, 1e-5)
        local = mx.argmax(each_own, axis=-1).astype(mx.uint32), mx.max(each_own, axis=-1)
        token, value = best_token(layer, *local)
        assert token.tolist() == mx.argmax(logits, axis=-1).tolist()
        assert_close(value, mx.max(logits, axis=-1), 1e-6)
    best[1] = best[1][0], mx.full((2, 3), np.nan)
    assert mx.isnan(best_token(made[0], *local)[1]).all().item()


@each("size, words", [(1, ""), (2, ""), (3, "2 heads of keys"), (4, "2 heads of keys")])
def test_heads_are_shared_equally(size, words):
    problem = split_problem(CONFIG, size)
    assert words in problem
    assert bool(problem) == bool(words)


def test_feed_forwards_are_shared_equally():
    config = dataclasses.replace(CONFIG, hidden_dim_scale_factor=2 + 1 / CONFIG.hidden_dim)
    assert "feed-forward channels" in split_problem(config, 2)


@each(
    "kind, size, words",
    [
        ("llama", 3, "num_attention_heads is 4"),
        ("qwen3", 4, "num_key_value_heads is 2"),
        ("mamba2", 2, "no method shard"),
    ],
)
def test_zoo_models_that_can_not_be_split(kind, size, words):
    with pytest.raises(ConfigError, match=words):
        split_model(zoo_model(kind, 64, 1), Ranks(Group(0, size)))


@each("granularity, is_split", [("group", True), ("row", False), ("tensor", False)])
def test_packed_experts_are_split_with_scales_of_groups(granularity, is_split):
    sizes = {"moe_intermediate_size": 64, "head_dim": 16}
    model = zoo_model("qwen3_moe", 64, 1, **sizes)
    group_size = 32 if is_split else None
    quantize_model(model, {}, QuantizationRule(4, "balanced", granularity, group_size))
    if is_split:
        split_model(model, Ranks(Group(0, 2)))
        experts = model.layers[0].mlp.switch_mlp
        assert experts.gate_proj.scales.shape == (8, 32, 2)
        assert experts.down_proj.scales.shape == (8, 64, 1)
        return
    with pytest.raises(
        ConfigError, match=r"^model.layers.0.mlp.switch_mlp.gate_proj has no scales"
    ):
        split_model(model, Ranks(Group(0, 2)))


def test_an_error_of_a_layer_stays_as_it_is():
    """Not wrapped into a second sentence, with a second full stop."""
    model = zoo_model("qwen3", 64, 1)
    quantize_model(model, {}, QuantizationRule(4, group_size=32))
    with pytest.raises(ConfigError, match=r"^model.layers.0.self_attn.o_proj has 32 inputs"):
        split_model(model, Ranks(Group(0, 2)))


def cut_in_memory(model, rank):
    split_model(model, Ranks(Group(rank, 2)))
    return dict(tree_flatten(model.parameters()))


@each("kind", ["float", "packed", "tracks", "packed tracks"])
def test_a_rank_reads_its_rows_of_the_files_alone(tmp_path, monkeypatch, spm_bpe, rng, kind):
    folder = tmp_path / kind
    if "tracks" in kind:
        model = random_tracks(TrackConfig(**SMALL | {"vocab_size": 128}), 1)
        write_tracks_folder(folder, model)
        (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer_json(128)))
    else:
        write_folder(folder, spm_bpe, rng, dataclasses.replace(CONFIG, hidden_dim_scale_factor=4.0))
    if "packed" in kind:
        folder = convert(folder, tmp_path / f"{kind} converted", quantize=True, q_bits=4)
    read, seen = {}, []

    def counting(self, ranges, read_rows=StoredTensor.read_rows):
        seen.append((mx.get_active_memory() - before, sum(read.values())))
        rows = read_rows(self, ranges)
        read[self.name] = rows.nbytes
        return rows

    monkeypatch.setattr(StoredTensor, "read_rows", counting)
    for rank in range(2):
        read.clear()
        seen.clear()
        mx.clear_cache()  # its buffers may be larger than what they are used for
        before = mx.get_active_memory()
        found = dict(tree_flatten(load(folder, ranks=Ranks(Group(rank, 2)))[0].parameters()))
        wanted = cut_in_memory(load(folder)[0], rank)
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert mx.array_equal(found[name], array), name
        whole = read_header(folder / "model.safetensors")
        cut = [name for name in found if found[name].shape[:1] != whole[name].shape[:1]]
        assert sorted(read) == sorted(cut)
        assert len(cut) > 8
        # No tensor is read whole before its rows are.
        assert all(in_memory <= of_rows + 512 for in_memory, of_rows in seen), seen


def test_one_process_holds_the_whole_model():
    model = Model(CONFIG)
    split_model(model, Ranks())
    assert model.kv_heads == CONFIG.num_kv_heads
    assert not hasattr(model, "ranks")

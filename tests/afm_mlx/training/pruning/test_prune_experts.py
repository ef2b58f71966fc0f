"""Fewer experts: the smaller model equals the whole one without the dropped experts, float and packed."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.convert import convert
from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.ranks import Ranks
from afm_mlx.track_config import TrackConfig
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.pruning.expert_layers import ExpertLayer, cut_parameters
from afm_mlx.training.pruning.expert_scores import CRITERIA, DROPS, OBSERVED
from afm_mlx.training.pruning.prune_experts import ExpertPruning, prune_experts
from tests.tools.compare import assert_close, error
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB = 64
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
KINDS = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "deepseek_v3": {
        **_MLA,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "num_kv_shared_layers": 0,
    },
}


class WithoutExperts(nn.Module):
    """A router that gives dropped experts logits of minus infinity."""

    def __init__(self, router, dropped):
        super().__init__()
        self.router = router
        self.dropped = dropped

    def __call__(self, x):
        return mx.where(self.dropped, -mx.inf, self.router(x))


class DroppedExperts(nn.Module):
    """Routers of several tracks, in one stack, whose dropped experts have logits of minus infinity."""

    def __init__(self, router, kept):
        super().__init__()
        self.linear = router
        experts = router.weight.shape[1]
        dropped = np.array([~np.isin(np.arange(experts), ids) for ids in kept])
        self._dropped = mx.array(dropped)[:, None]

    def __call__(self, x, indices):
        return mx.where(self._dropped, -mx.inf, self.linear(x, indices))


def drop(model, kept):
    """Take experts away from the routers of a whole model."""
    modules = dict(model.named_modules())
    for path, ids in kept.items():
        names = path.split(".")
        above = (modules[".".join(names[:n])] for n in range(len(names) - 1, 0, -1))
        owner, name = next(
            (module, name) for module in above for name in ("gate", "router") if name in module
        )
        router = owner[name]
        count = next(m.weight.shape[0] for m in modules[path].modules() if "weight" in m)
        dropped = mx.array(~np.isin(np.arange(count), ids))
        if "e_score_correction_bias" in router:
            bias = router.e_score_correction_bias
            router.e_score_correction_bias = mx.where(dropped, -1e9, bias)
            continue
        for inner in ("layer", "proj"):
            if inner in router:
                owner, name = router, inner
        owner[name] = WithoutExperts(owner[name], dropped)
    return model


@pytest.fixture
def folder(request, rng, tmp_path):
    kind = request.param
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)), **KINDS[kind])
    write_zoo_folder(tmp_path / kind, kind, model, word_tokenizer_json(VOCAB), **KINDS[kind])
    return tmp_path / kind


@pytest.fixture
def recipe(rng, tmp_path):
    """A function (model folder) -> a recipe of two steps on a few lines of text."""
    (tmp_path / "data").mkdir()
    for split, count in (("train", 4), ("valid", 2)):
        lines = [" ".join(f"w{i}" for i in rng.integers(2, VOCAB, 40)) for _ in range(count)]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / "data" / f"{split}.jsonl").write_text(text)
    loop = TrainingOptions(iters=2, learning_rate=1e-3, warmup_iters=0)
    return lambda model: Recipe(tmp_path / "data", loop, model=model, packing=False)


@pytest.fixture
def tokens(rng):
    return mx.array(rng.integers(2, VOCAB, (2, 12)))


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_it_equals_the_whole_model_without_the_dropped_experts(folder, recipe, tokens, tmp_path):
    result = prune_experts(recipe(folder), tmp_path / "small", ExpertPruning(0.5))
    assert result.experts_after * 2 == result.experts_before
    whole, small = load(folder)[0], load(tmp_path / "small")[0]
    assert error(small(tokens), whole(tokens)) > 1e-3
    assert_close(small(tokens), drop(whole, result.kept)(tokens), 1e-5)
    stock, _ = mlx_lm.load(str(tmp_path / "small"))
    assert_close(stock(tokens), small(tokens), 1e-5)
    assert result.perplexity_before != result.perplexity_after
    card = (tmp_path / "small" / "README.md").read_text()
    assert f"{result.experts_after} of {result.experts_before} in " in card


@pytest.mark.parametrize("options", [{}, {"q_mode": "affine", "q_bits": 4, "q_group_size": 32}])
@pytest.mark.parametrize("criterion", ["reap", "router"])
def test_each_track_keeps_its_own_experts(recipe, rng, tmp_path, options, criterion):
    config = TrackConfig(**SMALL | {"num_experts": 6, "sparse_feed_forward_hidden_dim": 32})
    folder = write_tracks_folder(tmp_path / "pt", random_tracks(config, int(rng.integers(2**31))))
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer_json(VOCAB)))
    if options:
        folder = convert(folder, tmp_path / "packed", quantize=True, **options)
    result = prune_experts(recipe(folder), tmp_path / "small", ExpertPruning(0.5, criterion))
    assert (result.experts_before, result.experts_after) == (6, 3)
    whole, small = load(folder)[0], load(tmp_path / "small")[0]
    modules, kept_apart = dict(whole.named_modules()), False
    for path, ids in result.kept.items():
        assert ids.shape == (4, 3)
        kept_apart |= len(np.unique(ids, axis=0)) > 1
        owner = modules[path.removesuffix(".experts")]
        owner.router = DroppedExperts(owner.router, ids)
    assert kept_apart
    tokens = mx.array(rng.integers(2, VOCAB, (2, 12)))
    assert_close(small(tokens), whole(tokens), 1e-5)


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"q_mode": "affine", "q_bits": 4, "q_group_size": 32},  # mlx-lm's own layers
        {"q_mode": "balanced", "q_bits": 2},
        {"q_mode": "balanced", "q_bits": 4, "q_granularity": "tensor"},
        {"q_mode": "affine", "q_bits": 4, "q_granularity": "row"},
    ],
)
def test_packed_experts_keep_their_codes(folder, recipe, tokens, tmp_path, options):
    packed = convert(folder, tmp_path / "packed", quantize=True, **options)
    result = prune_experts(recipe(packed), tmp_path / "small", ExpertPruning(0.5, "man"))
    assert result.bytes_after < 0.8 * result.bytes_before
    before, after = load_weights(packed), load_weights(tmp_path / "small")
    for path, ids in result.kept.items():
        for name in (f"{path}.up_proj.weight", f"{path.replace('switch_mlp', 'gate')}.weight"):
            assert before[name].dtype == mx.uint32
            assert mx.array_equal(before[name][mx.array(ids[0])], after[name])
    whole, small = load(packed)[0], load(tmp_path / "small")[0]
    assert_close(small(tokens), drop(whole, result.kept)(tokens), 1e-5)


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_palettes_that_experts_share_are_refused(folder, recipe, tmp_path):
    packed = convert(
        folder,
        tmp_path / "packed",
        quantize=True,
        q_mode="palette",
        q_group_size=8,
        quant_predicate=lambda path, _: path.endswith("mlp.gate"),
    )
    with pytest.raises(ConfigError, match=r"gate.table has 1 rows for 8 experts, which share them"):
        prune_experts(recipe(packed), tmp_path / "small", ExpertPruning(0.5))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_the_same_seed_keeps_the_same_experts(folder, recipe, tmp_path, criterion):
    pruning = ExpertPruning(0.25, criterion, seed=3)
    one, other = (prune_experts(recipe(folder), tmp_path / name, pruning) for name in "ab")
    for path, ids in one.kept.items():
        assert ids.shape == (1, 2)
        assert np.array_equal(ids, other.kept[path])
    assert load_weights(tmp_path / "a").keys() == load_weights(folder).keys()


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_an_expert_that_no_token_has_goes_first(folder, recipe, tmp_path):
    weights = load_weights(folder)
    for block in range(2):
        router = np.array(weights[f"model.layers.{block}.mlp.gate.weight"])
        # Of 4, 5, -4 and -5, two have a larger logit than 3, which is always 0.
        router[3] = 0
        router[[6, 7]] = -router[[4, 5]]
        weights[f"model.layers.{block}.mlp.gate.weight"] = mx.array(router)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for criterion in OBSERVED:
        for drop in DROPS if criterion in ("eae", "ets") else ("lowest",):
            path = tmp_path / f"{criterion}-{drop}"
            result = prune_experts(recipe(folder), path, ExpertPruning(7 / 8, criterion, drop))
            for ids in result.kept.values():
                assert 3 not in ids, path


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_rounds_score_what_is_left_and_may_train(folder, recipe, tokens, tmp_path):
    stages = []
    pruning = ExpertPruning(0.25, "man", rounds=3)
    result = prune_experts(recipe(folder), tmp_path / "small", pruning, on_stage=stages.append)
    assert stages == [
        "Round 1 of 3: 8 to 6 experts",
        "Round 2 of 3: 6 to 4 experts",
        "Round 3 of 3: 4 to 2 experts",
    ]
    whole, small = load(folder)[0], load(tmp_path / "small")[0]
    assert_close(small(tokens), drop(whole, result.kept)(tokens), 1e-5)
    trained = ExpertPruning(0.25, "man", rounds=2, train=True)
    plans = []
    result = prune_experts(recipe(folder), tmp_path / "trained", trained, on_plan=plans.append)
    assert len(plans) == 2
    whole = load(folder)[0]
    assert error(load(tmp_path / "trained")[0](tokens), drop(whole, result.kept)(tokens)) > 1e-3
    assert (
        "2 rounds, all weights trained after each"
        in (tmp_path / "trained" / "README.md").read_text()
    )
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("axis", [0, 1])
def test_each_router_of_a_shared_table_keeps_its_own(axis):
    shape = (6, 4) if axis == 0 else (2, 3, 4)
    array = mx.arange(24).reshape(shape)
    layer = ExpertLayer("experts", 3, 2, {"router": axis})
    kept = np.array([[0, 2], [1, 2]])
    cut = cut_parameters({"router": array}, layer, kept)["router"]
    rows = array.reshape(6, 4)[mx.array([0, 2, 4, 5])]
    assert mx.array_equal(cut, rows.reshape((4, 4) if axis == 0 else (2, 2, 4)))


def test_routers_on_another_axis_are_refused():
    layer = ExpertLayer("experts", 3, 2, {"router": 1})
    with pytest.raises(ConfigError, match=r"\[4, 3\] has no first axis of 2 routers"):
        cut_parameters({"router": mx.zeros((4, 3))}, layer, np.array([[0], [1]]))


@pytest.mark.parametrize("folder", ["qwen3_moe", "deepseek_v3"], indirect=True)
@pytest.mark.parametrize("share", [0.12, 0.99])
def test_shares_that_are_refused(folder, recipe, tmp_path, share):
    words = {
        ("qwen3_moe", 0.12): "1 of 8 experts would be kept, and .* computes 2 for each token",
        ("deepseek_v3", 0.12): "1 experts would be kept in each of 2 groups",
    }.get((folder.name, share), "A share of 0.99 keeps all 8 experts")
    with pytest.raises(ConfigError, match=words):
        prune_experts(recipe(folder), tmp_path / "small", ExpertPruning(share))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_later_rounds_are_checked_before_the_first(folder, recipe, tmp_path):
    for share, rounds, words in (
        (0.12, 3, "1 of 8 experts would be kept.* a share of 0.25 or more"),
        (0.5, 5, "rounds is 5, and 4 of 8 experts would be kept.* allowed are 1 to 4"),
    ):
        stages = []
        pruning = ExpertPruning(share, rounds=rounds)
        with pytest.raises(ConfigError, match=words):
            prune_experts(recipe(folder), tmp_path / "small", pruning, on_stage=stages.append)
        assert not stages


def test_models_without_experts_are_refused(model, recipe, rng, tmp_path):
    write_zoo_folder(
        tmp_path / "dense", "qwen3", zoo_model("qwen3", VOCAB, 1), word_tokenizer_json(VOCAB)
    )
    for folder in (model, tmp_path / "dense"):
        with pytest.raises(ConfigError, match="has no layers with several experts"):
            prune_experts(recipe(folder), tmp_path / "small")


def test_one_expert_may_be_left(recipe, tokens, rng, tmp_path):
    changes = {**KINDS["mixtral"], "num_local_experts": 2, "num_experts_per_tok": 1}
    model = zoo_model("mixtral", VOCAB, int(rng.integers(2**31)), **changes)
    folder = tmp_path / "float"
    write_zoo_folder(folder, "mixtral", model, word_tokenizer_json(VOCAB), **changes)
    result = prune_experts(recipe(folder), tmp_path / "small", ExpertPruning(0.5))
    whole, small = load(folder)[0], load(tmp_path / "small")[0]
    assert_close(small(tokens), drop(whole, result.kept)(tokens), 1e-5)


def test_models_that_mlx_lm_does_not_know_are_refused(recipe, tmp_path):
    (tmp_path / "other").mkdir()
    config = {"model_type": "no_such_type", "num_experts": 4}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="can't build a model of type 'no_such_type'"):
        prune_experts(recipe(tmp_path / "other"), tmp_path / "small")


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_packed_weights_are_not_trained(folder, recipe, tmp_path):
    packed = convert(folder, tmp_path / "packed", quantize=True, q_bits=4, q_group_size=32)
    with pytest.raises(ConfigError, match="is quantized, and training between rounds starts from"):
        prune_experts(recipe(packed), tmp_path / "small", ExpertPruning(train=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 1.0}, "share is 1.0; allowed: more than 0 and less than 1"),
        ({"criterion": "gradient"}, "criterion is 'gradient'; allowed: reap"),
        ({"drop": "last"}, "drop is 'last'; allowed: lowest, highest"),
        ({"rounds": 0}, "rounds is 0"),
        ({"score_texts": 0}, "score_texts is 0"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ExpertPruning(**options)


def test_several_ranks_are_refused(recipe, tmp_path, monkeypatch):
    class Group:
        def rank(self):
            return 0

        def size(self):
            return 2

    monkeypatch.setattr("afm_mlx.ranks.join_ranks", lambda: Ranks(Group()))
    with pytest.raises(ConfigError, match="this run has 2 ranks; start it without"):
        prune_experts(recipe("afm-nano"), tmp_path / "small")

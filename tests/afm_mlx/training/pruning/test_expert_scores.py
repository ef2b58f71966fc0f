"""Scores of experts: sums equal plain loops over tokens and experts, and the choice of those that stay."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from afm_mlx.errors import ConfigError
from afm_mlx.training.pruning.expert_layers import ExpertLayer, expert_layers, model_shapes
from afm_mlx.training.pruning.expert_observer import observe_experts
from afm_mlx.training.pruning.expert_scores import (
    DROPS,
    GRADIENTS,
    OBSERVED,
    WEIGHTS,
    expert_scores,
    kept_experts,
    router_scores,
)
from tests.tools.compare import assert_close
from tests.tools.zoo import zoo_model

VOCAB = 64
EXPERTS = {"qwen3_moe": 8, "gpt_oss": 4}


def layers_of(kind, model):
    key = "num_local_experts" if kind == "gpt_oss" else "num_experts"
    small = zoo_model(kind, VOCAB, 0, **{key: EXPERTS[kind] - 1})
    return expert_layers(model_shapes(model), model_shapes(small), EXPERTS[kind], EXPERTS[kind] - 1)


class Loop:
    """The outputs of one block's experts for inputs x (tokens, width), one expert and one token at a time."""

    def __init__(self, kind, block, x, tokens):
        self.experts = EXPERTS[kind]
        table = block.experts if kind == "gpt_oss" else block.switch_mlp
        logits = np.array((block.router if kind == "gpt_oss" else block.gate)(x), np.float64)
        self.outputs, self.gates, self.tokens = ([[] for _ in range(self.experts)] for _ in "123")
        self.chosen = []
        for place, row in enumerate(logits):
            chosen = np.argsort(-row)[:2]
            self.chosen.append(set(chosen.tolist()))
            weights = np.exp(row[chosen] - row[chosen].max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                y = table(x[None, place : place + 1], mx.array([[[int(expert)]]]))
                self.outputs[expert].append(np.array(y, np.float64).reshape(-1))
                self.gates[expert].append(weight)
                self.tokens[expert].append(tokens[place])

    def score(self, name, drop):
        """Scores of the criterion, the lowest of which are removed; from the definitions."""
        if name in ("ecc", "ets"):
            found = self.lasting(name, drop)
        else:
            found = [self.one(name, expert) for expert in range(self.experts)]
            found = -np.array(found) if drop == "highest" else np.array(found)
        unused = [not own for own in self.outputs]
        return np.where(unused, -np.inf, found)

    def one(self, name, expert):
        if not self.outputs[expert]:
            return 0.0
        y, g = np.array(self.outputs[expert]), np.array(self.gates[expert])
        lengths = np.linalg.norm(y, axis=1)
        if name == "eas":
            others = [np.array(own) for q, own in enumerate(self.outputs) if q != expert and own]
            return sum(np.mean([[cosine(a, b) for b in own] for a in y]) for own in others)
        if name == "eae":
            with np.errstate(divide="ignore"):
                return np.log(y.std(axis=0)).sum()
        return {
            "reap": (g * lengths).mean(),
            "man": lengths.mean(),
            "msan": (lengths**2).mean(),
            "ean": np.linalg.norm(y, axis=0).sum(),
            "eao": (np.abs(y - y.mean()) > 3 * y.std()).sum(),
            "frequency": len(y),
            "evtc": len(set(self.tokens[expert])),
        }[name]

    def lasting(self, name, drop):
        left, last, time = list(range(self.experts)), np.full(self.experts, float(self.experts)), 0
        while len(left) > 1:
            best = None
            for p, q in itertools.combinations(left, 2):
                ids = set(self.tokens[p]) & set(self.tokens[q])
                both = sum({p, q} <= chosen for chosen in self.chosen)
                value = (len(ids) if name == "ets" else both) * (-1 if drop == "highest" else 1)
                if best is None or value < best[0]:
                    best = value, p, q
            _, p, q = best
            gone = p if len(self.tokens[p]) < len(self.tokens[q]) else q
            last[gone] = time
            left.remove(gone)
            time += 1
        return last


def cosine(a, b):
    return (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)


class Kept(nn.Module):
    """A module that keeps its inputs."""

    def __init__(self, inner, inputs):
        super().__init__()
        self.inner = inner
        self._inputs = inputs

    def __call__(self, x):
        self._inputs.append(x)
        return self.inner(x)


@pytest.mark.parametrize("kind", EXPERTS)
def test_sums_equal_a_loop_over_tokens_and_experts(kind, rng):
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    layers = layers_of(kind, model)
    assert [layer.groups for layer in layers] == [1, 1]
    # Below and above 64 indices, from which on mlx-lm sorts tokens by expert.
    texts = [rng.integers(2, VOCAB, n).tolist() for n in (5, 40)]
    before = [model(mx.array([text])) for text in texts]
    scores = {
        (name, drop): expert_scores(model, layers, texts, name, drop=drop)
        for name in OBSERVED
        for drop in DROPS
    }
    for text, wanted in zip(texts, before, strict=True):
        assert_close(model(mx.array([text])), wanted, 1e-6, what="the model afterwards")
    inputs = []
    for block in model.layers:
        inputs.append([])
        block.mlp = Kept(block.mlp, inputs[-1])
    for text in texts:
        mx.eval(model(mx.array([text])))
    for index, (block, seen) in enumerate(zip(model.layers, inputs, strict=True)):
        x = mx.concatenate([x[0] for x in seen])
        loop = Loop(kind, block.mlp.inner, x, [*itertools.chain(*texts)])
        for (name, drop), found in scores.items():
            np.testing.assert_allclose(found[index], loop.score(name, drop), 1e-4, err_msg=name)


def test_by_weights_and_by_gradients(rng):
    """Against one expert and one pair at a time, and gradients of all of the model's parameters."""
    model = zoo_model("qwen3_moe", VOCAB, int(rng.integers(2**31)))
    layers = layers_of("qwen3_moe", model)
    texts = [rng.integers(2, VOCAB, n).tolist() for n in (9, 30)]

    def loss(model):
        logits = [model(mx.array([text])) for text in texts]
        losses = [
            nn.losses.cross_entropy(each[0, :-1], mx.array(text[1:]), reduction="sum")
            for each, text in zip(logits, texts, strict=True)
        ]
        return sum(losses)

    model.train()
    gradients = dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
    model.eval()
    weights = dict(tree_flatten(model.parameters()))
    for name in (*WEIGHTS, *GRADIENTS):
        found = expert_scores(model, layers, texts, name)
        arrays = weights if name in WEIGHTS else gradients
        for layer, own in zip(layers, found, strict=True):
            paths = [f"{layer.path}.{part}_proj.weight" for part in ("gate", "up", "down")]
            matrices = [np.array(arrays[path], np.float64) for path in paths]
            wanted = [
                score_of_numbers(name, [[matrix[p] for matrix in matrices] for p in range(8)], p)
                for p in range(8)
            ]
            np.testing.assert_allclose(own, wanted, 1e-3, err_msg=name)
        highest = expert_scores(model, layers, texts, name, drop="highest")
        assert np.array_equal(highest[0], -found[0])


def score_of_numbers(name, experts, p):
    """A criterion of weights or gradients for expert p; each expert has a list of matrices."""
    flat = [np.concatenate([matrix.ravel() for matrix in own]) for own in experts]
    if name in ("ews", "egs"):
        return sum(cosine(flat[p], other) for q, other in enumerate(flat) if q != p)
    if name == "ewn":
        return np.linalg.norm(flat[p])
    if name == "wsr":
        return sum((np.linalg.norm(m) / np.linalg.norm(m, 2)) ** 2 for m in experts[p])
    if name == "ego":
        return (np.abs(flat[p] - flat[p].mean()) > 3 * flat[p].std()).sum()
    rows = np.concatenate(
        [np.linalg.norm(m, axis=1) if name == "egn" else np.log(m.std(axis=1)) for m in experts[p]]
    )
    return rows.sum()


def test_packed_experts_have_no_gradient(rng):
    model = zoo_model("qwen3_moe", VOCAB, int(rng.integers(2**31)))
    layers = layers_of("qwen3_moe", model)
    nn.quantize(model, 32, 4, class_predicate=lambda path, _: path.endswith("_proj"))
    text = rng.integers(2, VOCAB, 9).tolist()
    with pytest.raises(ConfigError, match="gate_proj is packed, and has no gradient"):
        expert_scores(model, layers, [text], "egn")
    assert np.isfinite(expert_scores(model, layers, [text], "ewn")[0]).all()


class TwoRouters(nn.Module):
    """Two routers over one table, whose tokens are in the first axis: a block of parallel tracks."""

    def __init__(self, experts):
        super().__init__()
        self.router = mx.random.normal((2, experts, 16))
        self.experts = SwitchGLU(16, 8, 2 * experts)

    def __call__(self, x):
        logits = x @ self.router.swapaxes(-1, -2)  # (2, L, experts)
        chosen = mx.argpartition(-logits, kth=1, axis=-1)[..., :2]
        gates = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)
        table = chosen + logits.shape[-1] * mx.arange(2)[:, None, None]
        return (self.experts(x, table) * gates[..., None]).sum(axis=-2)


class Tracks(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.block = TwoRouters(experts)

    def __call__(self, tokens):
        return self.block(mx.broadcast_to(self.embedding(tokens), (2, tokens.shape[1], 16)))


def test_several_routers_can_share_a_table(rng):
    mx.random.seed(int(rng.integers(2**31)))
    model = Tracks(4)
    (layer,) = expert_layers(model_shapes(model), model_shapes(Tracks(3)), 4, 3)
    assert (layer.path, layer.groups, layer.axes["block.router"]) == ("block.experts", 2, 1)
    text = rng.integers(0, VOCAB, 30).tolist()
    (sums,) = observe_experts(model, [layer], [text], ("norm", "gated", "seen", "pairs"))
    assert sums.count.shape == (8,)
    assert sums.count.reshape(2, 4).sum(axis=1).tolist() == [60, 60]  # two experts for each token
    assert (sums.gated <= sums.norm).all()
    assert sums.gated.sum() > 0
    for own in (sums.seen[:4], sums.seen[4:]):
        assert np.flatnonzero(own.any(axis=0)).tolist() == sorted(set(text))
    assert not sums.pairs[:4, 4:].any()
    for name in (*OBSERVED, *WEIGHTS):
        (scores,) = expert_scores(model, [layer], [text], name)
        assert scores.shape == (8,), name
    last = expert_scores(model, [layer], [text], "ecc")[0].reshape(2, 4)
    assert (np.sort(last[np.isfinite(last).all(axis=1)], axis=1) == [0, 1, 2, 4]).all()


class SquaredBlock(TwoRouters):
    def __call__(self, x):
        return mx.square(super().__call__(x))


def test_gates_that_are_no_weights_are_refused(rng):
    mx.random.seed(int(rng.integers(2**31)))
    model = Tracks(4)
    (layer,) = expert_layers(model_shapes(model), model_shapes(Tracks(3)), 4, 3)
    model.block = SquaredBlock(4)
    text = rng.integers(0, VOCAB, 9).tolist()
    with pytest.raises(ConfigError, match=r"block.experts are not summed with one weight each"):
        observe_experts(model, [layer], [text], ("gated",))
    assert type(model.block) is SquaredBlock
    (sums,) = observe_experts(model, [layer], [text], ("norm",))
    assert sums.norm.sum() > 0


def test_rows_of_the_router(rng):
    model = zoo_model("qwen3_moe", VOCAB, int(rng.integers(2**31)))
    layer = layers_of("qwen3_moe", model)[0]
    gate = np.array(model.layers[0].mlp.gate.weight)
    np.testing.assert_allclose(
        router_scores(model, layer), -np.linalg.norm(gate, axis=1), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("groups", "sections", "number", "kept"),
    [
        (1, 1, 3, [[1, 2, 4]]),  # of three sevens, the first two
        (2, 1, 2, [[1, 2], [0, 1]]),
        (1, 2, 4, [[1, 2, 4, 5]]),
        (2, 2, 2, [[1, 2], [0, 3]]),
    ],
)
def test_the_best_experts_stay_in_each_group_and_section(groups, sections, number, kept):
    scores = np.array([0.0, 9, 7, 1, 7, 7, 2, 3])
    layer = ExpertLayer("experts", 8 // groups, groups, {})
    assert kept_experts(scores, layer, number, sections).tolist() == kept


def test_shapes_that_do_not_follow_the_experts_are_refused():
    whole = {"mlp.router.weight": (9, 4), "mlp.experts.up_proj.weight": (8, 4, 4)}
    small = {"mlp.router.weight": (8, 4), "mlp.experts.up_proj.weight": (7, 4, 4)}
    with pytest.raises(ConfigError, match=r"mlp.router.weight is \[9, 4\] for 8 experts"):
        expert_layers(whole, small, 8, 7)


def test_parameters_that_depend_on_the_number_of_experts_are_refused():
    whole = {"mlp.router.weight": (2, 4), "mlp.experts.up_proj.weight": (2, 4, 4)}
    with pytest.raises(ConfigError, match=r"with 1 experts has other parameters .* mlp.experts.up"):
        expert_layers(whole, {"mlp.up_proj.weight": (4, 4)}, 2, 1)

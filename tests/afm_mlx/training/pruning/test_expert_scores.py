"""Scores of experts: sums equal plain loops over tokens and experts, and the choice of those that stay."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from afm_mlx.errors import ConfigError
from afm_mlx.training.pruning.expert_layers import ExpertLayer, expert_layers, model_shapes
from afm_mlx.training.pruning.expert_scores import (
    OBSERVED,
    ExpertSums,
    kept_experts,
    observe_experts,
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


def loop_scores(kind, block, x):
    """Scores of one block for inputs x (tokens, width), from one expert and one token at a time."""
    experts = EXPERTS[kind]
    table = block.experts if kind == "gpt_oss" else block.switch_mlp
    logits = np.array((block.router if kind == "gpt_oss" else block.gate)(x), np.float64)
    outputs = [[] for _ in range(experts)]
    gates = [[] for _ in range(experts)]
    for token, row in enumerate(logits):
        chosen = np.argsort(-row)[:2]
        weights = np.exp(row[chosen] - row[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            y = table(x[None, token : token + 1], mx.array([[[int(expert)]]]))
            outputs[expert].append(np.array(y, np.float64).reshape(-1))
            gates[expert].append(weight)
    found = {name: np.zeros(experts) for name in OBSERVED}
    for expert in range(experts):
        if not outputs[expert]:
            continue
        y, g = np.array(outputs[expert]), np.array(gates[expert])
        lengths = np.linalg.norm(y, axis=1)
        found["reap"][expert] = (g * lengths).mean()
        found["man"][expert] = lengths.mean()
        found["msan"][expert] = (lengths**2).mean()
        found["ean"][expert] = np.linalg.norm(y, axis=0).sum()
        found["frequency"][expert] = len(y)
    return found


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
    sums = observe_experts(model, layers, texts)
    for text, wanted in zip(texts, before, strict=True):
        assert_close(model(mx.array([text])), wanted, 1e-6, what="the model afterwards")
    inputs = []
    for block in model.layers:
        inputs.append([])
        block.mlp = Kept(block.mlp, inputs[-1])
    for text in texts:
        mx.eval(model(mx.array([text])))
    for block, own, seen in zip(model.layers, sums, inputs, strict=True):
        assert own.k == 2
        x = mx.concatenate([x[0] for x in seen])
        for name, wanted in loop_scores(kind, block.mlp.inner, x).items():
            np.testing.assert_allclose(own.scores(name), wanted, rtol=1e-4, err_msg=name)


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
    (sums,) = observe_experts(model, [layer], [rng.integers(0, VOCAB, 30).tolist()])
    assert sums.count.shape == (8,)
    assert sums.count.reshape(2, 4).sum(axis=1).tolist() == [60, 60]  # two experts for each token
    assert (sums.gated <= sums.norm).all()
    assert sums.gated.sum() > 0


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
        observe_experts(model, [layer], [text])
    assert type(model.block) is SquaredBlock
    (sums,) = observe_experts(model, [layer], [text], with_gates=False)
    assert np.array_equal(sums.gated, sums.norm)


def test_experts_without_tokens_have_score_zero():
    sums = ExpertSums()
    sums.add(3, mx.array([[0, 2]]), mx.ones((1, 2, 4)), mx.array([[0.25, 0.75]]))
    for name in OBSERVED:
        scores = sums.scores(name)
        assert scores[1] == 0 < min(scores[0], scores[2])


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

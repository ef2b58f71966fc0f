"""LoRA on the image encoder and its adaptor: trained, saved, and run as an adapter."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.active import BatchAdapters, attach_adapter, bind, detach_adapter
from afm_mlx.adapters.formats.pair_order import vision_targets
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.target_modules import target_modules, target_shapes
from afm_mlx.errors import RequestError
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.vision_config import AdaptorConfig
from tests.tools.adapters import randomize_lora
from tests.tools.cases import draw
from tests.tools.compare import assert_close, assert_same, error
from tests.tools.models import random_config, random_model
from tests.tools.vision import with_images


@pytest.fixture
def model(rng):
    return random_model(
        with_images(random_config(rng, hidden_dim=32, num_heads=2, num_kv_heads=1)), rng
    )


def parts_of(model):
    return {path.rsplit(".lora_")[0].split(".")[1] for path in lora_tensors(model)}


def test_text_alone_is_adapted_unless_parts_are_named(rng, model):
    blocks = {"layers", "kv_reuse_layers"}
    for parts, wanted in (
        ({}, blocks),
        ({"parts": ["adaptor"]}, {"adaptor"}),
        ({"parts": ["text", "encoder"], "num_layers": 1}, {"encoder", *blocks}),
    ):
        other = random_model(model.args, rng)
        add_lora(other, 2, 1.0, **parts)
        assert parts_of(other) - blocks == wanted - blocks
        assert bool(parts_of(other) & blocks) == bool(wanted & blocks)


def test_every_linear_layer_of_the_vision_part_is_a_target(model):
    layers = {p for p, m in model.vision.named_modules() if isinstance(m, nn.Linear)}
    targets = [t for t in target_modules(model) if t.part != "text"]
    assert {t.path for t in targets} == {f"vision.{path}" for path in layers}
    assert {t.part for t in targets} == {"encoder", "adaptor"}


def test_targets_follow_from_the_config(rng, model):
    other = with_images(model.args, adaptor=AdaptorConfig("space_to_channel", mlp_dim=7))
    for each in (model, random_model(other, rng)):
        wanted = {p: s for p, s in target_shapes(each).items() if p.startswith("vision.")}
        found = vision_targets(each.args)
        assert {t.layer: {t.part: (t.inputs, t.outputs)} for t in found} == wanted
    assert vision_targets(random_config(rng)) == []


def test_a_part_that_a_model_lacks(rng):
    with pytest.raises(RequestError, match="has no encoder, towers that an adapter can change"):
        add_lora(random_model(random_config(rng), rng), 2, 1.0, parts=["encoder", "towers"])


@pytest.mark.parametrize("packed", [False, True])
def test_an_adapter_of_the_vision_part_runs_as_it_was_trained(rng, tmp_path, model, packed):
    pixels, ids = draw(rng, (2, 28, 28, 3)), mx.array([[1, 2, 3]])
    if packed:
        quantize_model(model, model.args.to_dict(), QuantizationRule(8, "balanced", "row"))
    before, text = model.vision(pixels), model(ids)
    add_lora(model, 2, 1.0, parts=["encoder", "adaptor"], seed=1)
    assert_close(model.vision(pixels), before, 1e-5)  # B is zero
    randomize_lora(model, rng)
    gradient = nn.value_and_grad(model, lambda m: m.vision.train()(pixels).square().sum())(model)[1]
    assert all(mx.abs(g).max().item() > 0 for _, g in tree_flatten(gradient))
    wanted = model.eval().vision(pixels)
    assert error(wanted, before) > 0.01
    save_lora(model, tmp_path / "adapter")

    other = random_model(model.args, rng)
    parameters = {
        n.replace(".linear.", "."): a
        for n, a in tree_flatten(model.parameters())
        if ".lora_" not in n
    }
    if packed:
        quantize_model(other, model.args.to_dict(), QuantizationRule(8, "balanced", "row"))
    other.load_weights(list(parameters.items()))
    attach_adapter(other, tmp_path / "adapter")
    assert_close(other.vision(pixels), wanted, 2e-3)  # in float16
    assert_close(other(ids), text, 1e-5)
    detach_adapter(other)
    with AdapterPool(other) as pool:
        pool.register("own", tmp_path / "adapter")
        active = bind(other)
        with active.using(None):
            assert_same(other.vision(pixels), before)
        with active.using(BatchAdapters.everywhere(pool.load("own"))):
            assert_close(other.vision(pixels), wanted, 2e-3)

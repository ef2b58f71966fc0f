"""Adapters on stacks of matrices, of tracks and of experts: trained, and each row's own in a batch."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters, bind, unbind
from afm_mlx.adapters.lora import add_lora, lora_layers, lora_tensors
from afm_mlx.adapters.resident import RankPart, build_resident
from afm_mlx.adapters.target_modules import target_modules, target_shapes
from afm_mlx.adapters.task_mask import feed_forwards
from afm_mlx.errors import RequestError
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.track_config import TrackConfig
from tests.tools.compare import assert_close, assert_same
from tests.tools.tracks import SMALL, random_tracks
from tests.tools.zoo import zoo_model

CONFIG = TrackConfig(
    **SMALL
    | {"num_layers_per_track": 4, "sparse_feed_forward_hidden_dim": 32}
    | {"dense_feed_forward_hidden_dim": 64}
)


def make(packed=False):
    model = random_tracks(CONFIG, 1)
    if packed:
        rule = QuantizationRule(8, "affine", "group", 32)
        quantize_model(model, {}, rule)
        model.eval()
    return model


def adapted(packed, seed):
    """A model with LoRA layers, all of whose numbers are float16's, and the numbers."""
    model = make(packed)
    add_lora(model, 2, 1.5, seed=seed)
    rng = np.random.default_rng(seed)
    tensors = {
        name: mx.array(rng.normal(0, 0.3, tensor.shape).astype(np.float16).astype(np.float32))
        for name, tensor in lora_tensors(model).items()
    }
    model.load_weights(list(tensors.items()), strict=False)
    return model.eval(), tensors


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "length", [1, 9]
)  # below and above the 64 rows from which experts are sorted
def test_rows_run_their_own_adapters(packed, length):
    tokens = mx.array(np.random.default_rng(0).integers(1, 97, (4, length)))
    model, (first, second) = make(packed), (adapted(packed, seed) for seed in (3, 4))
    wanted = [np.array(each(tokens)) for each in (first[0], model, second[0])]
    assert min(np.abs(wanted[i] - wanted[1]).max() for i in (0, 2)) > 0.1
    shapes = target_shapes(model)
    a, b = (build_resident(tensors, 1.5, shapes, "x") for _, tensors in (first, second))
    active = bind(model)
    with active.using(BatchAdapters.of([b, None, a, b])):
        found = np.array(model(tokens))
    for row, one in enumerate((2, 1, 0, 2)):
        assert_close(found[row], wanted[one][row], 1e-4)
    for batch in (BatchAdapters.everywhere(a), BatchAdapters.of([a] * 4)):
        with active.using(batch):
            assert_close(model(tokens), wanted[0], 1e-4)
    assert_close(model(tokens), wanted[1], 1e-6)
    unbind(model)
    assert not lora_layers(model)
    assert_same(model(tokens), wanted[1])


def test_every_matrix_of_a_stack_has_a_pair():
    model = make()
    targets = {target.key: target for target in target_modules(model) if target.block == 1}
    assert set(targets) == {
        f"{part}_proj" for part in ("self_attn.qkv", "self_attn.out", "mlp.experts.gate")
    } | {"mlp.router", "mlp.experts.up_proj", "mlp.experts.down_proj"}
    assert len(targets["mlp.experts.up_proj"].shapes) == 4 * 5
    assert targets["self_attn.qkv_proj"].shapes == {f".{i}": (32, 64) for i in range(4)}


def test_experts_of_other_mixtures_are_left_alone():
    keys = {target.key for target in target_modules(zoo_model("qwen3_moe", 61, 0))}
    assert not any("switch" in key for key in keys)


def test_masks_are_refused():
    with pytest.raises(RequestError, match="stacks of matrices, of tracks or of experts"):
        feed_forwards(make())


@pytest.mark.parametrize(("size", "packed"), [(2, False), (4, False), (2, True)])
def test_ranks_take_the_pairs_of_their_tracks_and_experts(size, packed):
    whole = target_shapes(make(packed))
    tensors = {
        f"{path}.{side}{end}": mx.full((2, 2), number)
        for path, ends in whole.items()
        for number, end in enumerate(ends)
        for side in ("lora_a", "lora_b")
    }
    found = {}
    for rank in range(size):
        model = make(packed)
        model.shard(SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size))
        assert target_shapes(model) == whole
        part = RankPart.of(model)
        taken = part.taken(tensors)
        for path, ends in part.shapes.items():
            assert len(ends) == len(whole[path]) // size
            numbers = [taken[f"{path}.lora_a{end}"][0, 0].item() for end in ends]
            found[path] = found.get(path, []) + numbers
            assert numbers == [taken[f"{path}.lora_b{end}"][0, 0].item() for end in ends]
        assert len(taken) == len(tensors) // size
    assert found == {path: list(range(len(ends))) for path, ends in whole.items()}

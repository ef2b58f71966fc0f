"""A composed adapter is the weighted sum of its parts, to the last bit where float32 can hold it."""

import dataclasses

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.compose import compose
from afm_mlx.adapters.resident import Base, open_adapter, open_sum
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import deltas
from tests.tools.compare import assert_close, assert_same, assert_same_tensors, exact


def product(tensors, config, name):
    """scale * A B of the pair whose A is `name`, in float64."""
    return config.scale * exact(tensors[name]) @ exact(tensors[name.replace("lora_a", "lora_b")])


@pytest.fixture
def two(make_model, write_adapter):
    keys = ["mlp.up_proj", "self_attn.qkv_proj"]
    one = write_adapter(make_model("float"), "one", rank=3, keys=keys)
    other = write_adapter(make_model("float"), "other", rank=6, num_layers=2)
    return load_adapter(one), load_adapter(other)


def test_products_add_up(two, rng):
    weights = [float(w) for w in rng.uniform(-2, 2, 2)]
    tensors, config = compose(two, weights)
    assert config.rank == 9
    assert config.scale == max(abs(w * c.scale) for w, (_, c) in zip(weights, two, strict=True))
    assert config.num_layers == 4
    assert config.keys == tuple(sorted({*two[0][1].keys, *two[1][1].keys}))
    names = {n for t, _ in two for n in t}
    assert set(tensors) == names
    for name in (n for n in names if ".lora_a" in n):
        parts = [w * product(*a, name) for w, a in zip(weights, two, strict=True) if name in a[0]]
        # B is multiplied once in float32.
        assert_close(product(tensors, config, name), sum(parts), 1e-6)


def test_nothing_is_rounded_where_the_product_fits(two):
    """Factors are those over the largest, which is the sum's scale."""
    half = [(t, dataclasses.replace(c, scale=0.25)) for t, c in two]
    tensors, config = compose(half, [0.5, -2.0])
    assert config.scale == 0.5
    for name in (n for n in tensors if ".lora_b" in n):
        start = 0
        for (parts, part_config), factor in zip(half, [0.25, -1.0], strict=True):
            found = tensors[name][start : start + part_config.rank]
            wanted = factor * parts[name] if name in parts else mx.zeros(found.shape)
            assert_same(found, wanted)
            start += part_config.rank


def test_a_written_sum_is_what_a_pool_runs(make_model, two, tmp_path, rng):
    model, weights = make_model("float"), [float(w) for w in rng.uniform(-2, 2, 2)]
    for name, adapter in zip(("one", "other"), two, strict=True):
        save_adapter(tmp_path / name, *adapter)
    save_adapter(tmp_path / "both", *compose(two, weights))
    base = Base.of(model)
    opened = [open_adapter(tmp_path / name, base) for name in ("one", "other", "both")]
    of_pool = open_sum(list(zip(opened[:2], weights, strict=True)), base, "a sum").read()
    of_file = opened[2].read()
    assert of_file.scale == of_pool.scale
    # Pools leave out the zeros that files fill up with.
    assert_same_tensors(deltas(of_file, model), deltas(of_pool, model))


def test_one_adapter_with_weight_1_is_itself(two):
    for adapters, weights in (([two[1]], [1.0]), (two, [0.0, 1.0])):
        tensors, config = compose(adapters, weights)
        assert config == two[1][1]
        assert_same_tensors(tensors, two[1][0])


def test_bases(two):
    (tensors, config), other = two
    own = config.base_model_fingerprint
    for base, force, wanted in ((own, False, own), (None, False, own), ("ef" * 32, True, None)):
        first = tensors, dataclasses.replace(config, base_model_fingerprint=base)
        found = compose([first, other], [1, 1], force=force)[1].base_model_fingerprint
        assert found == wanted
    with pytest.raises(CheckpointError, match=f"{'ef' * 32} and {own}"):
        compose([first, other], [1, 1])


def test_what_can_not_be_added_up(two):
    one, other = two
    for adapters, weights, words in (
        ([], [], "0 adapters and 0 weights"),
        ([one], [1, 2], "1 adapters and 2 weights"),
        ([one, other], [0, -0.0], "weights are 0, -0: no adapter is left"),
        ([one, other], [1, float("nan")], "is nan"),
        ([one, other], [float("inf"), 1], "is inf"),
        ([one, other], [1, 1e300], "is 1e\\+300, and .* float32 does not hold"),
    ):
        with pytest.raises(RequestError, match=words):
            compose(adapters, weights)
    tensors, config = one
    name = next(n for n in tensors if "up_proj.lora_b" in n)
    narrow = tensors | {name: tensors[name][:, :-1]}
    with pytest.raises(CheckpointError, match="made for different models"):
        compose([one, (narrow, config)], [1, 1])
    with pytest.raises(CheckpointError, match=r"Adapter 2: .* has no"):
        compose([one, ({n: t for n, t in tensors.items() if n != name}, config)], [1, 1])

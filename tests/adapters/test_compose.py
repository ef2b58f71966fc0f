"""A composed adapter is the weighted sum of its parts, to the last bit where float32 can hold it."""

import dataclasses

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.compose import compose
from afm_mlx.adapters.opening import Base, open_adapter, open_sum
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import deltas, some_tokens
from tests.tools.compare import assert_close, assert_same, assert_same_tensors, error, exact


def product(tensors, config, name):
    """scale * A B of the pair whose A is `name`, in float64."""
    return config.scale * exact(tensors[name]) @ exact(tensors[name.replace("lora_a", "lora_b")])


@pytest.fixture
def two(make_model, write_adapter):
    """Adapters of different ranks on different layers of one model."""
    one = write_adapter(
        make_model("float"), "one", rank=3, keys=["mlp.up_proj", "self_attn.qkv_proj"]
    )
    other = write_adapter(make_model("float"), "other", rank=6, num_layers=2)
    return load_adapter(one), load_adapter(other)


def test_products_add_up(two, rng):
    weights = [float(w) for w in rng.uniform(-2, 2, 2)]
    tensors, config = compose(two, weights)
    assert config.rank == 9
    assert config.scale == max(abs(w * c.scale) for w, (_, c) in zip(weights, two, strict=True))
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
    """Number for number: both go by one definition."""
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


def test_a_weight_of_zero_leaves_an_adapter_out(two):
    tensors, config = compose(two, [0.0, 2.0])
    assert config.rank == two[1][1].rank
    assert set(tensors) == set(two[1][0])


def test_a_model_runs_the_sum(make_model, two, tmp_path, rng):
    """One adapter with weight 1 computes what it computes alone; with 0 for the other, too."""
    model, tokens = make_model("float"), some_tokens(rng)
    found = []
    for index, (adapters, weights) in enumerate(
        [(two[:1], [1.0]), (two, [1.0, 0.0]), (two, [1.0, 0.5])]
    ):
        save_adapter(tmp_path / f"{index}", *compose(adapters, weights))
        found.append(attach_adapter(model, tmp_path / f"{index}")(tokens))
    save_adapter(tmp_path / "alone", *two[0])
    alone = attach_adapter(model, tmp_path / "alone")(tokens)
    bare = detach_adapter(model)(tokens)
    # Adapters run in float16, which rounds B once it was multiplied.
    for logits in found[:2]:
        assert_close(logits, alone, 1e-2)
    assert error(bare, alone) > 0.05
    assert error(found[2], alone) > 0.02


def test_bases(two):
    (tensors, config), other = two
    assert config.base_model_fingerprint is not None
    assert compose(two, [1, 1])[1].base_model_fingerprint == config.base_model_fingerprint
    unknown = tensors, dataclasses.replace(config, base_model_fingerprint=None)
    assert compose([unknown, other], [1, 1])[1].base_model_fingerprint == (
        other[1].base_model_fingerprint
    )
    stranger = tensors, dataclasses.replace(config, base_model_fingerprint="ef" * 32)
    with pytest.raises(CheckpointError, match=f"{'ef' * 32} and {config.base_model_fingerprint}"):
        compose([stranger, other], [1, 1])
    assert compose([stranger, other], [1, 1], force=True)[1].base_model_fingerprint is None


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
    with pytest.raises(CheckpointError, match=r"Adapter 2: .* is there without"):
        compose([one, ({n: t for n, t in tensors.items() if n != name}, config)], [1, 1])

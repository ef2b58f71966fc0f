"""Adapters in one array: where the numbers lie, what is refused, and what names them."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.attach import random_adapter
from afm_mlx.adapters.layer_places import place_shapes
from afm_mlx.adapters.resident import build_resident, plan_layout
from afm_mlx.checkpoint.safetensors_file import read_header, save_file
from afm_mlx.errors import CheckpointError
from afm_mlx.kernels import BLOCK, LowRank
from afm_mlx.kernels.reference import low_rank_factors
from tests.tools.compare import assert_same

# A fused layer whose projections are and are not whole blocks, and plain ones.
SHAPES = {
    "layers.0.qkv_proj": {".0": (24, 32), ".1": (24, 16), ".2": (24, 16)},
    "layers.0.odd_proj": {".0": (24, 20), ".1": (24, 10), ".2": (24, 10)},
    "layers.0.up_proj": {"": (24, 40)},
    "layers.1.up_proj": {"": (12, 64)},
}
HALF = 0.0625  # numbers of this grid are float16's, bfloat16's and float32's


def draw(rng, shape, dtype=np.float16):
    return (rng.integers(-64, 65, shape) * HALF).astype(dtype)


def tensors_of(rng, ranks):
    """Of all places, each pair of a rank drawn from `ranks`; tensors by name."""
    tensors = {}
    for path, sections in SHAPES.items():
        for end, (inputs, outputs) in sections.items():
            rank = int(rng.choice(ranks))
            tensors[f"{path}.lora_a{end}"] = draw(rng, (inputs, rank))
            tensors[f"{path}.lora_b{end}"] = draw(rng, (rank, outputs))
    return tensors


def factors(resident, path):
    """A and B as the kernels' definition reads them, of each section: (rank, K), (N_i, rank)."""
    sections = np.cumsum([width for _, width in SHAPES[path].values()]).tolist()
    low_rank = LowRank(
        (resident.numbers,), (resident.parts[path],), mx.ones(1), mx.zeros(1), tuple(sections)
    )
    (inputs, _), *_ = SHAPES[path].values()
    a, b = (np.array(x) for x in low_rank_factors(low_rank, 0, inputs))
    return list(zip(np.split(a, len(sections)), np.split(b, sections[:-1]), strict=True))


def check(resident, tensors):
    for path, sections in SHAPES.items():
        for end, (a, b) in zip(sections, factors(resident, path), strict=True):
            wanted_a = tensors.get(f"{path}.lora_a{end}")
            if wanted_a is None:
                assert not b.any()
                continue
            rank = wanted_a.shape[1]
            assert_same(a[:rank], wanted_a.T)
            assert_same(b[:, :rank], tensors[f"{path}.lora_b{end}"].T)
            assert not a[rank:].any()
            assert not b[:, rank:].any()


def test_every_number_is_in_its_place(rng):
    tensors = tensors_of(rng, [1, 3, 8, 17])
    resident = build_resident(tensors, 0.5, SHAPES, "x")
    check(resident, tensors)
    assert resident.nbytes == plan_layout(tensors, SHAPES, "x").nbytes == resident.numbers.nbytes
    assert resident.scale == 0.5
    assert resident.rank == max(t.shape[1] for n, t in tensors.items() if "lora_a" in n)
    for part in resident.parts.values():
        assert part.a % BLOCK == part.b % BLOCK == 0


def test_sections_and_layers_may_be_left_out(rng):
    tensors = tensors_of(rng, [2, 5])
    for name in ("layers.0.qkv_proj.lora_{}.1", "layers.0.odd_proj.lora_{}.0"):
        del tensors[name.format("a")], tensors[name.format("b")]
    check(build_resident(tensors, 1.0, SHAPES, "x"), tensors)
    few = {n: t for n, t in tensors.items() if "layers.1" in n}
    assert list(build_resident(few, 1.0, SHAPES, "x").parts) == ["layers.1.up_proj"]


def test_every_source_of_numbers(rng, tmp_path):
    """Arrays of MLX, NumPy's, and tensors in a file; all types."""
    tensors = tensors_of(rng, [4])
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        arrays = {n: mx.array(t).astype(dtype) for n, t in tensors.items()}
        save_file(tmp_path / "a.safetensors", arrays)
        sources = (tensors, arrays, read_header(tmp_path / "a.safetensors"))
        residents = [build_resident(source, 1.0, SHAPES, "x") for source in sources]
        for resident in residents:
            check(resident, tensors)
        assert len({resident.fingerprint for resident in residents}) == 1
        assert len({resident.layout for resident in residents}) == 1


def test_fingerprints_tell_adapters_apart(rng):
    tensors = tensors_of(rng, [4])
    name = str(rng.choice(list(tensors)))
    other = tensors | {name: tensors[name] + np.float16(HALF)}
    wider = tensors_of(rng, [6])
    prints = [
        build_resident(t, scale, SHAPES, "x").fingerprint
        for t, scale in ((tensors, 0.5), (tensors, 1.0), (other, 0.5), (wider, 0.5))
    ]
    assert len(set(prints)) == 4
    layouts = [build_resident(t, 1.0, SHAPES, "x").layout for t in (tensors, other, wider)]
    assert layouts[0] == layouts[1] != layouts[2]


def test_one_number_makes_another_fingerprint(rng):
    tensors = tensors_of(rng, [64])
    known = build_resident(tensors, 0.5, SHAPES, "x").fingerprint
    for _ in range(20):
        name = str(rng.choice(list(tensors)))
        changed = tensors[name].copy()
        changed[tuple(rng.integers(0, changed.shape))] += np.float16(HALF)
        assert build_resident(tensors | {name: changed}, 0.5, SHAPES, "x").fingerprint != known


def test_tensors_of_another_model(rng):
    tensors = tensors_of(rng, [3])
    with pytest.raises(CheckpointError, match=r"no layer for layers\.9\.lora_a \(2 such"):
        extra = {"layers.9.lora_a": draw(rng, (2, 3)), "layers.9.lora_b": draw(rng, (3, 2))}
        build_resident(tensors | extra, 1.0, SHAPES, "x")
    with pytest.raises(CheckpointError, match=r"is \[24, 3\] and \[3, 41\].*\[rank, 40\]"):
        wrong = {"layers.0.up_proj.lora_b": draw(rng, (3, 41))}
        build_resident(tensors | wrong, 1.0, SHAPES, "x")
    with pytest.raises(CheckpointError, match=r"is \[24, 3\] and \[2, 40\]"):
        wrong = {"layers.0.up_proj.lora_b": draw(rng, (2, 40))}
        build_resident(tensors | wrong, 1.0, SHAPES, "x")
    with pytest.raises(CheckpointError, match=r"has lora_a only"):
        del tensors["layers.0.up_proj.lora_b"]
        build_resident(tensors, 1.0, SHAPES, "x")


def test_random_adapters_fit_their_model(make_model):
    model = make_model()
    shapes = place_shapes(model)
    resident = build_resident(random_adapter(model, 4), 1.0, shapes, "x")
    assert set(resident.parts) == set(shapes)

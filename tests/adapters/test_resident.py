"""Adapters in one array: where the numbers lie, what is refused, and what names them."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.resident import build_resident, plan_layout
from afm_mlx.checkpoint.safetensors_file import read_header, save_file
from afm_mlx.errors import CheckpointError
from afm_mlx.kernels import BLOCK, LowRank
from afm_mlx.kernels.reference import low_rank_factors
from tests.tools.cases import each
from tests.tools.compare import assert_same

# A fused layer whose projections are and are not whole blocks, and plain ones.
SHAPES = {
    "layers.0.qkv_proj": {".0": (32, 32), ".1": (32, 16), ".2": (32, 16)},
    "layers.0.odd_proj": {".0": (24, 20), ".1": (24, 10), ".2": (24, 10)},
    "layers.0.up_proj": {"": (24, 40)},
    "layers.1.up_proj": {"": (12, 64)},
}
HALF = 0.0625  # numbers of this grid are float16's, bfloat16's and float32's


@pytest.fixture(autouse=True)
def used_memory(monkeypatch):
    """The array that an adapter gets holds NaN, which nothing may leave there."""

    def unfilled(size):
        numbers = mx.full(size, mx.nan, mx.float16)
        mx.eval(numbers)
        return numbers

    monkeypatch.setattr("afm_mlx.adapters.resident.unfilled", unfilled)


def draw(rng, shape):
    return (rng.integers(-64, 65, shape) * HALF).astype(np.float16)


def tensors_of(rng, ranks):
    """Of all places, each pair of a rank drawn from `ranks`; tensors by name."""
    tensors = {}
    for path, sections in SHAPES.items():
        for end, (inputs, outputs) in sections.items():
            rank = int(rng.choice(ranks))
            tensors[f"{path}.lora_a{end}"] = draw(rng, (inputs, rank))
            tensors[f"{path}.lora_b{end}"] = draw(rng, (rank, outputs))
    return tensors


def build(tensors, scale=1.0):
    return build_resident(tensors, scale, SHAPES, "x")


def check(resident, tensors):
    """Compare the matrices that the kernels' definition reads with the tensors that they were built from."""
    for path, sections in SHAPES.items():
        widths = np.cumsum([width for _, width in sections.values()]).tolist()
        low_rank = LowRank(
            (resident.numbers,), (resident.parts[path],), mx.ones(1), mx.zeros(1), tuple(widths)
        )
        (inputs, _), *_ = sections.values()
        all_a, all_b = (np.array(x) for x in low_rank_factors(low_rank, 0, inputs))
        pairs = zip(np.split(all_a, len(sections)), np.split(all_b, widths[:-1]), strict=True)
        for end, (a, b) in zip(sections, pairs, strict=True):
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
    resident = build(tensors, 0.5)
    check(resident, tensors)
    assert resident.nbytes == plan_layout(tensors, SHAPES, "x")[1] == resident.numbers.nbytes
    assert resident.scale == 0.5
    assert resident.rank == max(t.shape[1] for n, t in tensors.items() if "lora_a" in n)
    for part in resident.parts.values():
        assert part.a % BLOCK == part.b % BLOCK == 0


@pytest.mark.parametrize("ranks", [[1], [2, 5]])
def test_sections_and_layers_may_be_left_out(rng, ranks):
    tensors = tensors_of(rng, ranks)
    for name in ("layers.0.qkv_proj.lora_{}.1", "layers.0.odd_proj.lora_{}.0"):
        del tensors[name.format("a")], tensors[name.format("b")]
    check(build(tensors), tensors)
    few = {n: t for n, t in tensors.items() if "layers.1" in n}
    assert list(build(few).parts) == ["layers.1.up_proj"]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_every_source_of_numbers(rng, tmp_path, dtype):
    """Arrays of MLX, NumPy's, and tensors in a file."""
    tensors = tensors_of(rng, [4])
    arrays = {n: mx.array(t).astype(dtype) for n, t in tensors.items()}
    save_file(tmp_path / "a.safetensors", arrays)
    sources = (tensors, arrays, read_header(tmp_path / "a.safetensors"))
    residents = [build(source) for source in sources]
    for resident in residents:
        check(resident, tensors)
    assert len({(resident.fingerprint, resident.layout) for resident in residents}) == 1


def test_fingerprints_and_layouts_tell_adapters_apart(rng):
    """By the scale, the rank, or any one number."""
    tensors, wide = tensors_of(rng, [64]), tensors_of(rng, [65])
    residents = [build(tensors), build(tensors, 0.5), build(wide)]
    for _ in range(20):
        name = str(rng.choice(list(tensors)))
        changed = tensors[name].copy()
        changed[tuple(rng.integers(0, changed.shape))] += np.float16(HALF)
        residents.append(build(tensors | {name: changed}))
        assert residents[-1].fingerprint != residents[0].fingerprint
    assert len({resident.fingerprint for resident in residents[:4]}) == 4
    assert len({resident.layout for resident in residents}) == 2
    assert residents[2].layout != residents[0].layout


UP = "layers.0.up_proj.lora_b"


@each(
    ("change", "words"),
    [
        (
            {"layers.9.lora_a": np.ones((2, 3)), "layers.9.lora_b": np.ones((3, 2))},
            r"no layer for layers\.9\.lora_a \(2 such",
        ),
        ({UP: np.ones((3, 41))}, r"is \[24, 3\] and \[3, 41\].*\[rank, 40\]"),
        ({UP: np.full((3, 40), np.nan)}, r"up_proj\.lora_b holds NaN or infinity"),
        ({UP: np.pad([[-np.inf]], ((0, 2), (0, 39)))}, r"up_proj\.lora_b holds NaN or infinity"),
        ({UP: np.full((3, 40), 65520.0)}, "up to 65520, and float16, .* ends at 65504"),
    ],
)
def test_tensors_that_do_not_fit(rng, change, words):
    with pytest.raises(CheckpointError, match=words):
        build(tensors_of(rng, [3]) | change)

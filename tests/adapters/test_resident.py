"""Adapters in one array: where the numbers lie, what is refused, and what names them."""

import contextlib
import dataclasses
import itertools
import shutil
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters import pool as pools
from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import Base, OpenAdapter, build_resident, plan_layout
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.checkpoint.safetensors_file import read_header, save_file
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.kernels import BLOCK, LowRank
from afm_mlx.kernels.reference import low_rank_factors
from tests.tools.adapters import (
    WAIT,
    deltas,
    draw_tensors,
    hold_and_wait,
    state,
    until,
    write_folder,
)
from tests.tools.cases import each
from tests.tools.compare import assert_same, assert_same_tensors, assert_within

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
    tensors = tensors_of(rng, [4])
    arrays = {n: mx.array(t).astype(dtype) for n, t in tensors.items()}
    save_file(tmp_path / "a.safetensors", arrays)
    sources = (tensors, arrays, read_header(tmp_path / "a.safetensors"))
    residents = [build(source) for source in sources]
    for resident in residents:
        check(resident, tensors)
    assert len({(resident.fingerprint, resident.layout) for resident in residents}) == 1


def test_fingerprints_and_layouts_tell_adapters_apart(rng):
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


# -- What is opened to run: any format, files that change, and what can't be used


TASKS = Path("/proc/self/task")

# -- other formats


@pytest.fixture
def other(folder, model, tmp_path):
    def write(to, **options):
        tensors, config = read_adapter(folder("x"))
        config = dataclasses.replace(config, base_model_fingerprint=base_model_fingerprint(model))
        path = tmp_path / f"other.{to}"
        write_adapter(path, tensors, config, to, model_config=model.args, **options)
        return path

    return write


@pytest.mark.parametrize("to", ["peft", "fmadapter"])
def test_adapters_of_other_formats_run_as_they_are(make_pool, other, model, tmp_path, to):
    pool = make_pool("")
    pool.register(to, other(to))
    pool.register("x", tmp_path / "x")
    wanted, found = deltas(pool.load("x"), model), deltas(pool.load(to), model)
    assert set(wanted) == set(found)
    for layer, delta in wanted.items():
        allowed = 0.01 * np.abs(delta) + 2e-3 * np.abs(delta).max()
        assert_within(found[layer], delta, allowed, layer)


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts this process' threads as Linux shows them")
@pytest.mark.parametrize(("to", "dtype"), [("mlx-lm", mx.float16), ("peft", mx.bfloat16)])
def test_loading_leaves_no_threads(make_pool, other, to, dtype):
    """MLX gives each thread that computes a stream, with a thread or a GPU queue, and never takes it back."""
    pool = make_pool("")
    pool.register("other", other(to, dtype=dtype))
    pool.register("half", {"other": 0.5})
    counts = []
    for _ in range(12):
        for name in ("other", "half"):
            pool.load(name)
            pool.unload(name)
        counts.append(len(list(TASKS.iterdir())))
    assert counts[-1] - counts[0] < 6


def test_what_waits_for_room_takes_no_memory(make_pool, other, model, size, monkeypatch):
    """Other formats are read whole to be opened, and again when there is room."""
    opened, original, path = [], pools.open_adapter, other("peft")

    def noted(*args):
        result = original(*args)
        opened.append(weakref.ref(result))
        return result

    monkeypatch.setattr(pools, "open_adapter", noted)
    pool = make_pool("a", budget=size)
    pool.register("other", path)
    held, lease = hold_and_wait(pool, "a", "other")
    until(lambda: [ref() for ref in opened] == [None, None])
    held.release()
    assert lease.wait(WAIT)
    assert len(opened) == 3
    wanted = original(path, Base.of(model)).read()
    assert_same_tensors(deltas(lease.resident, model), deltas(wanted, model))


# -- files that change


def test_a_resident_adapter_needs_its_folder_no_more(make_pool, folder, size):
    pool = make_pool("", budget=size)
    path = folder("gone")
    pool.register("x", path)
    pool.register("y", folder("other"))
    pool.load("x")
    shutil.rmtree(path)
    assert pool.load("x").nbytes == size
    pool.load("y")
    with pytest.raises(CheckpointError, match=r"no adapter .*gone\. Was it moved or deleted"):
        pool.load("x")
    assert pool.load("y").nbytes == size


def test_another_adapter_in_the_same_folder_is_refused(make_pool, folder, model, rng):
    pool, path = make_pool(""), folder("changed")
    pool.register("x", path)
    before = pool.load("x").fingerprint
    write_folder(path, draw_tensors(model, rng, 4))
    assert pool.load("x").fingerprint == before
    pool.unload("x")
    with pytest.raises(CheckpointError, match=rf"was {before} and is .*Unregister"):
        pool.load("x")
    pool.unregister("x")
    pool.register("x", path)
    assert pool.load("x").fingerprint != before


def test_a_file_that_is_replaced_while_it_is_read(make_pool, gate, model, rng, tmp_path):
    pool = make_pool("a")
    lease = pool.request("a")
    assert gate.reached.wait(WAIT)
    write_folder(tmp_path / "a", draw_tensors(model, rng, 4))
    gate.set()
    assert lease.wait(WAIT)
    assert "changed while it was read" in str(lease.error)
    assert pool.load("a").rank == 4


def test_an_adapter_that_grows_while_it_waits_for_room(make_pool, size, model, rng, tmp_path):
    pool = make_pool("ab", budget=size)
    held, lease = hold_and_wait(pool, "a", "b")
    write_folder(tmp_path / "b", draw_tensors(model, rng, 6))
    held.release()
    assert lease.wait(WAIT)
    with pytest.raises(CheckpointError, match=f"has grown from {size:,} bytes"):
        lease.resident  # noqa: B018  the property raises


# -- what can't be used


def test_adapters_of_another_base(model, tmp_path, rng):
    own, other, path = base_model_fingerprint(model), "ab" * 32, tmp_path / "x"
    for wanted, force in itertools.product((other, None, own), (False, True)):
        write_folder(path, draw_tensors(model, rng, 4), fingerprint=wanted)
        refused = pytest.raises(CheckpointError, match=f"{other}, and this one has {own}")
        with AdapterPool(detach_adapter(model), force=force) as pool:
            pool.register("x", path)
            with refused if wanted == other and not force else contextlib.nullcontext():
                pool.load("x")
            with refused if wanted == other and not force else contextlib.nullcontext():
                attach_adapter(model, path, force=force)


@each(
    ("spoil", "words"),
    [
        (lambda path, own: write_folder(path, {n: t[:, 1:] if "_b" in n else t for n, t in own.items()}),
         "the layer needs"),
        (lambda path, own: write_folder(path, {n: np.nan * own[n] for n in own}), "holds NaN or infinity"),
        (lambda path, own: (path / TENSORS_NAME).unlink(), "safetensors is missing"),
        (lambda path, own: (path / CONFIG_NAME).write_text("{"), "not valid JSON"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_used(make_pool, model, rng, tmp_path, spoil, words):
    pool, path = make_pool(["b", "bad"]), tmp_path / "bad"
    spoil(path, draw_tensors(model, rng, 4))
    for load in (
        lambda: pool.load("bad"),
        lambda: pool.load({"bad": 0.5, "b": 0.5}),
        lambda: attach_adapter(model, path),
    ):
        with pytest.raises(AFMError, match=words) as caught:
            load()
        assert "bad" in str(caught.value)
    assert pool.load("b").rank == 4
    assert [entry["name"] for entry in pool.describe()["adapters"]] == ["b", "bad"]


def test_an_unforeseen_error_reaches_who_waits(make_pool, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("mine")

    pool = make_pool("ab")
    with monkeypatch.context() as patch:
        patch.setattr(OpenAdapter, "read", broken)
        with pytest.raises(ZeroDivisionError, match="mine"):
            pool.load("a")
        patch.setattr(pools, "open_adapter", broken)
        with pytest.raises(ZeroDivisionError, match="mine"):
            pool.load("b")
    assert state(pool, "b")["error"] == "ZeroDivisionError('mine')"
    assert pool.load("a").rank == 4

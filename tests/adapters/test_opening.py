"""What is opened to run: any format, files that change, and what can't be used."""

import contextlib
import dataclasses
import itertools
import shutil
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters import scheduler
from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME
from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.opening import Base, OpenAdapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.errors import AFMError, CheckpointError
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
from tests.tools.compare import assert_same_tensors, assert_within

TASKS = Path("/proc/self/task")

# -- other formats


@pytest.fixture
def other(folder, model, tmp_path):
    """A function that writes the adapter of `folder("x")` in another format."""

    def write(to, **options):
        tensors, config = read_adapter(folder("x"))
        config = dataclasses.replace(config, base_model_fingerprint=base_model_fingerprint(model))
        path = tmp_path / f"other.{to}"
        write_adapter(path, tensors, config, to, model_config=model.args, **options)
        return path

    return write


@pytest.mark.parametrize("to", ["peft", "fmadapter"])
def test_adapters_of_other_formats_run_as_they_are(make_pool, other, model, tmp_path, to):
    """And give what the folder gives that they were converted from."""
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
    opened, original, path = [], scheduler.open_adapter, other("peft")

    def noted(*args):
        result = original(*args)
        opened.append(weakref.ref(result))
        return result

    monkeypatch.setattr(scheduler, "open_adapter", noted)
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


UP, NEW = "model.layers.0.mlp.up_proj", "model.layers.77.mlp.up_proj"
HALVES = np.ones((64, 64), np.float16)


@each(
    ("spoil", "words"),
    [
        (
            lambda path, own: write_folder(path, own | {f"{UP}.lora_b": HALVES[:4]}),
            r"up_proj is \[64, 4\] and \[4, 64\], and the layer needs .*\[rank, 128\]",
        ),
        (
            lambda path, own: write_folder(path, {n: np.nan * own[n] for n in own}),
            "holds NaN or infinity",
        ),
        (
            lambda path, own: write_folder(
                path, {f"{NEW}.lora_a": HALVES[:, :4], f"{NEW}.lora_b": HALVES[:4]}
            ),
            r"no layer for model\.layers\.77",
        ),
        (lambda path, own: (path / TENSORS_NAME).unlink(), "safetensors is missing"),
        (lambda path, own: (path / TENSORS_NAME).write_bytes(b"x" * 40), "no whole"),
        (lambda path, own: (path / CONFIG_NAME).write_text("{"), "not valid JSON"),
    ],
)
def test_adapters_that_cannot_be_used(make_pool, model, rng, tmp_path, spoil, words):
    """By themselves and in a sum; the pool serves the others."""
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
        patch.setattr(scheduler, "open_adapter", broken)
        with pytest.raises(ZeroDivisionError, match="mine"):
            pool.load("b")
    assert state(pool, "b")["error"] == "ZeroDivisionError('mine')"
    assert pool.load("a").rank == 4

"""What a pool reads: formats, files that change, and what can't be used."""

import dataclasses
import itertools
import shutil
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters import scheduler
from afm_mlx.adapters.adapter_folder import TENSORS_NAME
from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.opening import Base, OpenAdapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, RequestError
from tests.tools.adapters import WAIT, deltas, draw_tensors, state, until, write_folder
from tests.tools.compare import assert_same_tensors, assert_within

TASKS = Path("/proc/self/task")

# -- other formats


def test_adapters_of_other_formats_run_as_they_are(make_pool, folder, model, tmp_path):
    """And give what the folder gives that they were converted from."""
    path, pool = folder("x"), make_pool("")
    tensors, config = read_adapter(path)
    config = dataclasses.replace(config, base_model_fingerprint=base_model_fingerprint(model))
    pool.register("x", path)
    wanted = deltas(pool.load("x"), model)
    for to in ("peft", "fmadapter"):
        write_adapter(tmp_path / f"other.{to}", tensors, config, to, model_config=model.args)
        pool.register(to, tmp_path / f"other.{to}")
        found = deltas(pool.load(to), model)
        assert set(wanted) == set(found)
        for layer, delta in wanted.items():
            allowed = 0.01 * np.abs(delta) + 2e-3 * np.abs(delta).max()
            assert_within(found[layer], delta, allowed, layer)


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts this process' threads as Linux shows them")
@pytest.mark.parametrize(("to", "dtype"), [("mlx-lm", mx.float16), ("peft", mx.bfloat16)])
def test_loading_leaves_no_threads(make_pool, folder, model, tmp_path, to, dtype):
    """MLX gives each thread that computes a stream, with a thread or a GPU queue, and never takes it back."""
    tensors, config = read_adapter(folder("x"))
    write_adapter(tmp_path / "other", tensors, config, to, dtype=dtype, model_config=model.args)
    pool = make_pool("")
    pool.register("other", tmp_path / "other")
    pool.register("half", {"other": 0.5})
    counts = []
    for _ in range(12):
        for name in ("other", "half"):
            pool.load(name)
            pool.unload(name)
        counts.append(len(list(TASKS.iterdir())))
    assert counts[-1] - counts[0] < 6


def test_what_waits_for_room_takes_no_memory(make_pool, folder, model, size, tmp_path, monkeypatch):
    """Other formats are read whole to be opened, and again when there is room."""
    tensors, config = read_adapter(folder("x"))
    config = dataclasses.replace(config, base_model_fingerprint=base_model_fingerprint(model))
    write_adapter(tmp_path / "other", tensors, config, "peft")
    opened, original = [], scheduler.open_adapter

    def noted(*args):
        result = original(*args)
        opened.append(weakref.ref(result))
        return result

    monkeypatch.setattr(scheduler, "open_adapter", noted)
    pool = make_pool("a", budget=size)
    pool.register("other", tmp_path / "other")
    held = pool.request("a")
    assert held.wait(WAIT)
    lease = pool.request("other")
    until(lambda: state(pool, "other")["state"] == "waiting")
    assert len(opened) == 2
    until(lambda: [ref() for ref in opened] == [None, None])
    held.release()
    assert lease.wait(WAIT)
    assert len(opened) == 3
    wanted = deltas(scheduler.open_adapter(tmp_path / "other", Base.of(model)).read(), model)
    assert_same_tensors(deltas(lease.resident, model), wanted)


def test_an_adapter_that_grows_while_it_waits_for_room(make_pool, folder, size, model, rng):
    pool = make_pool("a", budget=size)
    path = folder("b")
    pool.register("b", path)
    held = pool.request("a")
    assert held.wait(WAIT)
    lease = pool.request("b")
    until(lambda: state(pool, "b")["state"] == "waiting")
    write_folder(path, draw_tensors(model, rng, 6))
    held.release()
    assert lease.wait(WAIT)
    with pytest.raises(CheckpointError, match=f"has grown from {size:,} bytes"):
        _ = lease.resident


def test_what_is_no_adapter_is_an_error_of_its_load(make_pool, tmp_path):
    pool = make_pool("")
    (tmp_path / "one.zip").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    for name, words in (("one.zip", "is an archive or a file"), ("empty", "it holds nothing")):
        pool.register(name, tmp_path / name)
        with pytest.raises(CheckpointError, match=words):
            pool.load(name)


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


def test_a_file_that_is_replaced_while_it_is_read(make_pool, folder, gate, model, rng):
    pool, path = make_pool(""), folder("changing")
    pool.register("x", path)
    lease = pool.request("x")
    assert gate.reached.wait(WAIT)
    write_folder(path, draw_tensors(model, rng, 4))
    gate.set()
    assert lease.wait(WAIT)
    assert "changed while it was read" in str(lease.error)
    assert pool.load("x").rank == 4


# -- bad input


def test_adapters_of_another_base(model, tmp_path, rng):
    own = base_model_fingerprint(model)
    for wanted, force in itertools.product(("ab" * 32, None, own), (False, True)):
        path = write_folder(tmp_path / "x", draw_tensors(model, rng, 4), fingerprint=wanted)
        with AdapterPool(model, force=force) as pool:
            pool.register("x", path)
            if wanted in (None, own) or force:
                assert pool.load("x").rank == 4
                continue
            with pytest.raises(CheckpointError, match=f"{wanted}, and this one has {own}"):
                pool.load("x")


UP = "model.layers.0.mlp.up_proj"


def of_up_proj(numbers):
    """A function that puts these into the place of an adapter's B."""
    return lambda tensors: tensors.update({f"{UP}.lora_b": numbers})


BAD = [
    (lambda t: t[f"{UP}.lora_b"].__setitem__((1, 2), np.nan), r"up_proj\.lora_b holds NaN"),
    (lambda t: t[f"{UP}.lora_b"].__setitem__((0, 3), np.inf), r"up_proj\.lora_b holds NaN or"),
    (
        of_up_proj(np.ones((4, 128), np.int32)),
        r"up_proj\.lora_b is int32; an adapter's tensors are",
    ),
    (of_up_proj(np.ones((4, 128), np.uint8)), r"up_proj\.lora_b is uint8"),  # too few to be numbers
    (of_up_proj(np.ones((4, 128), bool)), r"up_proj\.lora_b is bool"),
    (lambda t: t.pop(f"{UP}.lora_a"), r"without .*up_proj\.lora_a"),
    (
        lambda t: t.update(
            {
                "model.layers.77.mlp.up_proj.lora_a": np.ones((64, 4), np.float16),
                "model.layers.77.mlp.up_proj.lora_b": np.ones((4, 64), np.float16),
            }
        ),
        r"no layer for model\.layers\.77",
    ),
    (of_up_proj(np.ones((4, 6), np.float16)), r"up_proj is \[64, 4\] and \[4, 6\]"),
    (lambda t: t.update(weight=np.ones(3, np.float16)), "no LoRA tensor"),
    (of_up_proj(np.full((4, 128), 1e6, np.float32)), "float16.*ends at 65504"),
]


def test_tensors_that_cannot_be_used(make_pool, folder, model, rng):
    pool, path = make_pool("b"), folder("bad")
    for change, words in BAD:
        tensors = draw_tensors(model, rng, 4)
        change(tensors)
        arrays = {name: mx.array(tensor) for name, tensor in tensors.items()}
        mx.save_safetensors(str(path / TENSORS_NAME), arrays)
        pool.register("bad", path)
        with pytest.raises(CheckpointError, match=words) as caught:
            pool.load("bad")
        assert str(path) in str(caught.value)
        with pytest.raises(CheckpointError, match=words):
            pool.load({"bad": 0.5, "b": 0.5})
        with pytest.raises(CheckpointError, match=words):
            attach_adapter(model, path)
        assert pool.load("b").rank == 4
        assert pool.resident == ["b"]
        pool.unregister("bad")


def test_folders_that_cannot_be_used(make_pool, folder):
    pool = make_pool("b")
    for change, kind, words in (
        (lambda p, t: t.unlink(), CheckpointError, "safetensors is missing"),
        (lambda p, t: t.write_bytes(b"x" * 40), CheckpointError, "no whole"),
        (lambda p, t: t.write_bytes(t.read_bytes()[:-1]), CheckpointError, "cut off"),
        (lambda p, t: p.write_text("{"), ConfigError, "not valid JSON"),
        (lambda p, t: p.write_text('{"fine_tune_type": "dora"}'), ConfigError, "dora"),
        (
            lambda p, t: p.write_text('{"lora_parameters": {"rank": 5, "scale": 1}}'),
            CheckpointError,
            "rank 5 needs",
        ),
    ):
        path = folder("bad")
        pool.register("bad", path)
        change(path / "adapter_config.json", path / TENSORS_NAME)
        for adapter in ("bad", {"bad": 0.5, "b": 0.5}):
            with pytest.raises(kind, match=words):
                pool.load(adapter)
        assert pool.load("b").rank == 4
        assert [entry["name"] for entry in pool.describe()["adapters"]] == ["b", "bad"]
        pool.unregister("bad")


def test_an_unforeseen_error_reaches_who_waits(make_pool, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("mine")

    pool = make_pool("ab")
    with monkeypatch.context() as patch:
        patch.setattr(OpenAdapter, "read", broken)
        with pytest.raises(ZeroDivisionError, match="mine"):
            pool.load("a")
        patch.setattr(scheduler, "open_adapter", lambda *args: broken(None))
        with pytest.raises(ZeroDivisionError, match="mine"):
            pool.load("b")
    assert state(pool, "b")["error"] == "ZeroDivisionError('mine')"
    assert pool.load("a").rank == 4


def test_names_and_sources(make_pool, folder):
    """Names are never paths."""
    pool, path = make_pool(""), folder("x")
    for name in ("", "  ", "a\nb", "\0", "x" * 201, None, 5):
        with pytest.raises(RequestError, match="adapter name is"):
            pool.register(name, path)
    for source in (None, 5, ["a"], ""):
        with pytest.raises(RequestError, match="a path, or weights of registered adapters"):
            pool.register("x", source)
    assert pool.registered == []
    for name in ("../../etc", "/", "C:\\x", "a/b c.zip", "日本"):
        pool.register(name, path)
        assert pool.load(name).rank == 4


def test_a_path_may_begin_at_home(make_pool, folder, monkeypatch):
    path = folder("mine")
    monkeypatch.setenv("HOME", str(path.parent))
    pool = make_pool("")
    pool.register("mine", "~/mine")
    assert pool.load("mine").rank == 4


def test_what_can_not_be_registered(make_pool, folder, tmp_path):
    pool, path = make_pool("ab"), folder("x")
    with pytest.raises(RequestError, match=r"'a' is taken, by .*a1"):
        pool.register("a", path)
    with pytest.raises(CheckpointError, match="nowhere, and there is no such path"):
        pool.register("c", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="xxx, and that can't be read: File name too long"):
        pool.register("c", "x" * 5000)
    pool.register("much", {"a": 1e200})
    for weights, words in (
        ({"z": 1}, "no adapter 'z'; registered are a, b, much"),
        ({"a": float("nan")}, "weight of the adapter 'a' is nan"),
        ({"a": "1"}, "is '1'"),
        ({"a": True}, "is True"),
        ({"a": 10**400}, "a finite number is needed"),
        ({"much": 1e200}, "weight of the adapter 'a' is inf"),
        ({"a": 0}, "leave no adapter"),
        ({}, "leave no adapter"),
    ):
        with pytest.raises(RequestError, match=words):
            pool.register("c", weights)
        with pytest.raises(RequestError, match=words):
            pool.request(weights)
    for adapter in (5, None, ["a"]):
        with pytest.raises(RequestError, match="a registered name, weights by name"):
            pool.request(adapter)
    assert pool.registered == ["a", "b", "much"]


def test_weights_of_every_numeric_type(make_pool):
    pool = make_pool("ab")
    for kind in (int, np.int64, np.float16, np.float32, np.float64):
        assert pool.load({"a": kind(2), "b": kind(1)}) is pool.load({"b": 1.0, "a": 2.0})
        assert pool.load({"b": kind(1)}) is pool.load("b")


def test_pools_that_can_not_be(model, folder):
    for budget in (0, -1, 1.5, True):
        with pytest.raises(RequestError, match=f"budget is {budget}"):
            AdapterPool(model, budget=budget)
    attach_adapter(model, folder("x"))
    with pytest.raises(AFMError, match="detach_adapter"):
        AdapterPool(model)

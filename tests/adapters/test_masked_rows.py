"""Rows that run with task masks: one for all, different ones in a batch, with LoRA, and swapped."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters, attach_adapter, bind, detach_adapter
from afm_mlx.adapters.resident import Base, open_adapter, open_masked
from afm_mlx.adapters.task_mask import TaskMask, apply_mask, write_mask
from tests.tools.adapters import (
    KINDS,
    draw_tensors,
    ragged_cache,
    some_tokens,
    steps,
    write_folder,
)
from tests.tools.compare import assert_close, assert_same
from tests.tools.masks import draw_mask

BOUND = 1e-5


@pytest.fixture
def write(rng, tmp_path):
    """A function that writes a folder with a mask, an adapter, or both, for a model."""

    def made(model, name, share=0.5, rank=None, **options):
        folder = tmp_path / name
        if rank is not None:
            write_folder(folder, draw_tensors(model, rng, rank))
        if share is not None:
            write_mask(folder, draw_mask(model, rng, share, **options))
        return folder

    return made


def alone(make_model, kind, folder, adapter=None):
    """A model that was made smaller by the folder's mask, if there is one, and runs with its adapter."""
    from afm_mlx.adapters.lora import add_lora
    from afm_mlx.adapters.task_mask import feed_forwards, has_mask, read_mask

    model = make_model(kind)
    if folder is None:
        return model
    layers = feed_forwards(model)
    mask = read_mask(folder) if has_mask(folder) else None
    if mask is not None:
        apply_mask(model, mask)
    if (folder / "adapters.safetensors").is_file():
        tensors = mx.load(str(folder / "adapters.safetensors"))
        rank = next(t.shape[1] for name, t in tensors.items() if ".lora_a" in name)
        for each in layers if mask is not None else ():
            at = mx.array(mask.channels(each.block))
            for target in (each.gate, each.up):
                tensors[f"{target.path}.lora_b"] = tensors[f"{target.path}.lora_b"][:, at]
            tensors[f"{each.down.path}.lora_a"] = tensors[f"{each.down.path}.lora_a"][at]
        add_lora(model, rank, 0.5)
        model.load_weights([(n, t.astype(mx.float32)) for n, t in tensors.items()], strict=False)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 4])
def test_an_attached_mask_equals_the_smaller_model(kind, rank, make_model, write, rng):
    model, tokens = make_model(kind), some_tokens(rng)
    folder = write(model, "task", rank=rank)
    before = model(tokens)
    attach_adapter(model, folder)
    wanted = alone(make_model, kind, folder)(tokens)
    assert_close(model(tokens), wanted, BOUND if rank is None or kind == "float" else 1e-3)
    assert mx.abs(wanted - before).max() > 1e-2
    detach_adapter(model)
    assert_same(model(tokens), before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_different_masks_and_adapters(kind, make_model, write, rng):
    model = make_model(kind)
    folders = [
        write(model, "mask"),
        write(model, "both", rank=4),
        write(model, "lora", share=None, rank=3),
        None,
        write(model, "other", share=0.25, rank=2),
    ]
    base = Base.of(model)
    residents = [None if f is None else open_adapter(f, base).read() for f in folders]
    order = [0, 1, 3, 0, 2, 4]
    prompts = [rng.integers(0, 64, int(n)) for n in rng.integers(2, 9, len(order))]
    follow = np.asarray(rng.integers(0, 64, (len(order), 4)))
    rows = [residents[i] for i in order]
    active, caches = bind(model), []
    for prompt, row in zip(prompts, rows, strict=True):
        with active.using(BatchAdapters.of([row])):
            caches.append(model.make_cache("float"))
            model.prefill(mx.array(prompt[None]), caches[-1])
    cache = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    with active.using(BatchAdapters.of(rows)):
        got = steps(model, cache, mx.array(follow))
    for i, (which, prompt) in enumerate(zip(order, prompts, strict=True)):
        twin = alone(make_model, kind, folders[which])
        wanted = steps(twin, ragged_cache(twin, [prompt], "float"), mx.array(follow[i : i + 1]))
        assert_close(got[i : i + 1], wanted, BOUND if kind == "float" else 2e-3, which)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_keeps_all_channels_changes_no_bit(kind, make_model, write, rng, tmp_path):
    model, tokens = make_model(kind), some_tokens(rng)
    before = model(tokens)
    write_mask(tmp_path / "all", TaskMask(np.ones((4, 8), bool)))
    attach_adapter(model, tmp_path / "all")
    assert bind(model).batch.masks == ()
    assert_same(model(tokens), before)
    adapter = write(model, "lora", share=None, rank=4)
    attach_adapter(model, adapter)
    with_lora = model(tokens)
    attach_adapter(model, adapter, mask=tmp_path / "all")
    assert_same(model(tokens), with_lora)


def test_a_swap_of_masks_of_equal_widths_does_not_trace_again(make_model, write, rng):
    model = make_model("packed")
    base = Base.of(model)
    equal = [write(model, name, equal=True, rank=4) for name in "ab"]
    residents = [open_adapter(f, base).read() for f in (*equal, write(model, "c", 0.25, rank=4))]
    assert residents[0].layout == residents[1].layout != residents[2].layout
    active, cache = bind(model), ragged_cache(model, [np.arange(1, 5)] * 2, "float")
    token = mx.array([[3], [4]])
    traces, outputs = [], []
    for row in ([0, 0], [1, 1], [0, 1], [1, 0], [2, 2]):
        with active.using(BatchAdapters.of([residents[i] for i in row])):
            outputs.append(model(token, cache))
        mx.eval(outputs[-1])
        traces.append(len(model._step.keys))
    assert traces == [1, 1, 2, 2, 3]
    assert mx.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_a_trace_adds_the_adapter_of_each_masks_rows(make_model, write, rng):
    """Batches with other numbers of rows of two masks, of equal layouts, share a trace, and are right."""
    model = make_model("packed")
    base = Base.of(model)
    folders = [write(model, name, equal=True, rank=4) for name in "ab"]
    residents = [open_adapter(folder, base).read() for folder in folders]
    active, token = bind(model), mx.array([[3]] * 3)

    def outputs(*row):
        cache = ragged_cache(model, [np.arange(1, 5)] * len(row), "float")
        with active.using(BatchAdapters.of([residents[i] for i in row])):
            found = model(token[: len(row)], cache)
            mx.eval(found)
        return found

    alone = [outputs(0), outputs(1)]
    for row in ([0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 0, 0]):
        for got, i in zip(outputs(*row), row, strict=True):
            assert_close(got, alone[i][0], 2e-3, row)
    assert len(model._step.keys) == 2  # of one row, and of three


def test_an_adapter_and_a_mask_are_one(make_model, write):
    model = make_model("packed")
    base, adapter, mask = Base.of(model), write(model, "a", None, rank=4), write(model, "m")
    both = open_masked(adapter, mask, base)
    resident = both.read()
    assert resident.nbytes == both.nbytes
    assert resident.rank == 4
    prints = {
        each.read().fingerprint
        for each in (both, open_adapter(adapter, base), open_adapter(mask, base))
    }
    assert len(prints) == 3
    write_mask(adapter, resident.mask)
    assert open_adapter(adapter, base).read().fingerprint == resident.fingerprint

"""Damaged and hostile prompt cache files: what is taken back gives the logits that it gave before."""

import copy
import json

import mlx.core as mx
import numpy as np

from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from tests.hostile.file_mutations import (
    changed_json,
    changed_safetensors,
    pick,
    read_safetensors,
    safetensors_bytes,
    some_value,
)
from tests.hostile.folders import MODERATE
from tests.hostile.harness import Case, run_cases
from tests.tools.models import random_config, random_model

LENGTH = 23


def test_changed_files_give_right_logits_or_one_error(rng, tmp_path):
    model = random_model(random_config(rng, num_layers=3, num_kv_reuse_layers=1), rng)
    files, tokens = {}, mx.array(rng.integers(0, model.args.vocab_size, (2, LENGTH)))
    for kind in (("int8", None, False), ("float", 100, False), ("int8", 16, True)):
        for rows in (1, 2):
            cache = model.make_cache(*kind)
            if rows == 2:
                cache = [layer.merge([layer, layer]) for layer in cache]
            model.prefill(tokens[:rows], cache)
            path = tmp_path / f"{kind[0]}-{kind[2]}-{rows}.safetensors"
            save_prompt_cache(path, cache, model)
            _, data = read_safetensors(path)
            right = model(mx.repeat(tokens[:1, :1], rows, axis=0), cache)
            files[path] = data, right, cache[0].kind
    path = tmp_path / "changed.safetensors"

    def changed(rng):
        source = pick(rng, list(files))
        data, right, kind = files[source]
        header, _ = read_safetensors(source)
        tensors = [name for name in header if name != "__metadata__"]
        change = rng.random()
        if change < 0.3:
            content = safetensors_bytes(_changed_metadata(rng, header), data)
        elif change < 0.5:
            content = safetensors_bytes(header, _changed_rows(rng, header, data))
        else:
            content = changed_safetensors(rng, header, data)

        def run():
            path.write_bytes(content)
            cache, _ = load_prompt_cache(path, model)
            rows = len(cache[0].lengths)
            now = model(mx.repeat(tokens[:1, :1], rows, axis=0), cache)
            layers = [layer for layer in cache if not layer.empty()]
            if max(float(mx.abs(layer.in_use()).max()) for layer in layers) <= MODERATE:
                assert mx.isfinite(now).all().item(), "logits that are not finite"
            found, found_data = read_safetensors(path)
            same = found_data == data and all(found[name] == header[name] for name in tensors)
            if same and cache[0].kind == kind:
                assert mx.array_equal(now, right).item(), "other logits from the same numbers"

        return Case(f"{source.stem}: {content[8:1800]!r}", run)

    run_cases(changed, rng, 0.12)


def _changed_metadata(rng, header):
    """One of our own fields, as text that may be no JSON, or as JSON of another kind."""
    header = copy.deepcopy(header)
    own = header["__metadata__"]
    key = pick(rng, ["kind", "kind", "metadata", "format", "version", "model", "adapter"])
    kind = int(rng.integers(5))
    if kind == 0:
        del own[key]
    elif kind == 1:
        own[key] = some_value(rng)  # a header's metadata are strings
    elif kind == 2:
        own[key] = json.dumps(some_value(rng))
    elif kind == 3:
        own[key] = changed_json(rng, {"kind": ["int8", 16, True]})
    else:
        sizes = [None, 0, 1, 4, 5, 16, 22, 23, 24, 1000, 2**31, 2**70, 1.5, "16", True]
        kind = [pick(rng, axis) for axis in (["int8", "float", "x"], sizes, [True, False, 1])]
        own["kind"] = json.dumps(kind)
    return header


def _changed_rows(rng, header, data):
    """False tokens seen or forgotten, of one block or of all alike."""
    names = [name for name in header if name.endswith(".rows")]
    chosen = names if rng.random() < 0.5 else [pick(rng, names)]
    value = pick(rng, [0, 1, -1, 22, 24, 100, 2**31 - 1, -(2**31), int(rng.integers(50))])
    place = rng.random()
    changed = bytearray(data)
    for name in chosen:
        begin, end = header[name]["data_offsets"]
        rows = np.frombuffer(data[begin:end], "<i4").copy()
        rows[int(place * rows.size)] = value
        if rng.random() < 0.2:  # what was seen grows with what was forgotten
            rows += value
        changed[begin:end] = rows.tobytes()
    return bytes(changed)

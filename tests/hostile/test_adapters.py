"""Damaged and hostile adapters of all four formats, in every way that an adapter is loaded."""

import json

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.active import (
    active_adapters,
    adapter_fingerprint,
    attach_adapter,
    detach_adapter,
)
from afm_mlx.adapters.adapter_folder import AdapterConfig
from afm_mlx.adapters.formats import FORMATS, read_adapter, write_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import FLOAT16_MAX
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from tests.hostile.file_mutations import (
    changed_bytes,
    changed_json,
    changed_safetensors,
    pick,
    read_safetensors,
)
from tests.hostile.folders import CONFIG, MODERATE, logits, replaced
from tests.hostile.harness import Case, run_cases
from tests.tools.adapters import draw_tensors
from tests.tools.models import random_model

ENDS = {"toolkit": ".pt", "fmadapter": ".fmadapter"}


def test_changed_adapters_give_right_answers_or_one_error(rng, tmp_path):
    model = random_model(CONFIG, rng)
    tensors = {name: mx.array(t) for name, t in draw_tensors(model, rng, rank=4).items()}
    config = AdapterConfig(4, 0.5, -1, base_model_fingerprint=base_model_fingerprint(model))
    files, right = {}, {}
    for kind in FORMATS:
        path = tmp_path / f"{kind.replace('-', '_')}{ENDS.get(kind, '')}"
        write_adapter(path, tensors, config, kind, model_config=CONFIG)
        attach_adapter(model, path)
        right[path] = adapter_fingerprint(model), logits(model)
        # The toolkit's config is next to its file.
        files[path] = sorted(path.iterdir() if path.is_dir() else tmp_path.glob(f"{path.stem}*"))
    detach_adapter(model)

    def attach(path):
        try:
            attach_adapter(model, path)
            now, (fingerprint, before) = logits(model), right[path]
            if adapter_fingerprint(model) == fingerprint:
                assert mx.array_equal(now, before).item(), "other logits from the same adapter"
            (resident,) = active_adapters(model).batch.residents
            if float(mx.abs(resident.numbers).max()) * abs(resident.scale) < MODERATE:
                assert mx.isfinite(now).all().item(), "logits that are not finite"
        finally:
            detach_adapter(model)

    def pool(path, chosen="one"):
        with AdapterPool(model) as pool:
            pool.register("one", path)
            assert mx.isfinite(pool.load(chosen).numbers).all().item()

    def pool_of_a_sum(path):
        pool(path, {"one": 0.5})

    def read(path):
        for array in read_adapter(path, CONFIG)[0].values():
            assert mx.issubdtype(array.dtype, mx.floating)
            assert mx.isfinite(array).all().item()

    def changed(rng):
        path = pick(rng, list(files))
        file, way = (
            pick(rng, files[path]),
            pick(rng, [attach] * 4 + [pool, pool_of_a_sum, read] * 2),
        )
        content = _changed(rng, file)

        def run():
            with replaced(file, content):
                way(path)

        return Case(
            f"{way.__name__} {file.relative_to(tmp_path)}: {(content or b'gone')[:1500]!r}", run
        )

    run_cases(changed, rng, 0.12)


def _changed(rng, file):
    if rng.random() < 0.02:
        return None
    if file.suffix == ".json" and rng.random() < 0.9:
        return changed_json(rng, json.loads(file.read_text())).encode(errors="replace")
    if file.suffix == ".safetensors":
        return changed_safetensors(rng, *read_safetensors(file))
    content = file.read_bytes()
    if file.name != "adapter_weights.bin" or rng.random() < 0.6:
        return changed_bytes(rng, content)
    at = int(rng.integers(128, len(content) - 1)) // 2 * 2
    number = np.float16(pick(rng, [np.nan, np.inf, -np.inf, FLOAT16_MAX, 0, 1])).tobytes()
    return content[:at] + number + content[at + 2 :]

"""Damaged and hostile task masks: the same logits, or one error."""

import json

import mlx.core as mx

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.task_mask import MASK_CONFIG_NAME, MASK_NAME, write_mask
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from tests.hostile.file_mutations import changed_json, changed_safetensors, pick, read_safetensors
from tests.hostile.folders import CONFIG, logits, replaced
from tests.hostile.harness import Case, run_cases
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.masks import draw_mask
from tests.tools.models import random_model


def test_changed_masks_give_right_answers_or_one_error(rng, tmp_path):
    model = random_model(CONFIG, rng)
    mask = draw_mask(model, rng, base_model_fingerprint=base_model_fingerprint(model), group=8)
    write_folder(tmp_path / "both", draw_tensors(model, rng, rank=4))
    right = {}
    for name in ("alone", "both"):
        write_mask(tmp_path / name, mask)
        attach_adapter(model, tmp_path / name)
        right[name] = logits(model)
    detach_adapter(model)

    def attach(name):
        try:
            attach_adapter(model, tmp_path / name)
            assert mx.array_equal(logits(model), right[name]).item(), "other logits"
        finally:
            detach_adapter(model)

    def pool(name):
        with AdapterPool(model) as pool:
            pool.register("one", tmp_path / name)
            assert pool.load("one").mask.fingerprint == mask.fingerprint

    def changed(rng):
        name, way = pick(rng, list(right)), pick(rng, [attach, pool])
        file = tmp_path / name / pick(rng, [MASK_NAME, MASK_CONFIG_NAME])
        if rng.random() < 0.02:
            content = None
        elif file.name == MASK_NAME:
            content = changed_safetensors(rng, *read_safetensors(file))
        else:
            content = changed_json(rng, json.loads(file.read_text())).encode(errors="replace")

        def run():
            with replaced(file, content):
                way(name)

        return Case(f"{way.__name__} {name}: {(content or b'gone')[:1500]!r}", run)

    run_cases(changed, rng, 0.04)

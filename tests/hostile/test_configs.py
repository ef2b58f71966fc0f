"""Damaged and hostile `config.json` files, and overrides of their values."""

import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_folder
from tests.hostile.file_mutations import changed_json, pick, some_value
from tests.hostile.folders import check_loads_right, logits, write_folders
from tests.hostile.harness import Case, run_cases, share


@pytest.fixture
def folders(tmp_path, rng):
    folders = write_folders(tmp_path, rng)
    return {name: (path, load_model(path)) for name, path in folders.items()}


def test_changed_configs_give_right_answers_or_one_error(folders, rng):
    answers = {name: logits(model) for name, (_, model) in folders.items()}
    configs = {
        n: json.loads((path / "config.json").read_text()) for n, (path, _) in folders.items()
    }

    def changed(rng: np.random.Generator) -> Case:
        name = pick(rng, list(folders))
        folder, model = folders[name]
        text = changed_json(rng, configs[name])
        facts = rng.random() < 0.2
        if facts and rng.random() < 0.5:
            text = text.replace("afm7", "llama")

        def run() -> None:
            (folder / "config.json").write_text(text, errors="replace")
            if facts:
                describe_folder(folder)
            else:
                check_loads_right(folder, answers[name], model)

        return Case(f"{name}: {text}", run)

    run_cases(changed, rng, share(0.11))


def test_changed_layers_quantization(folders, rng):
    """Entries of single layers, which overrule the common keys."""
    names = ["packed", "affine", "palette", "float"]
    answers = {name: logits(folders[name][1]) for name in names}
    configs = {n: json.loads((folders[n][0] / "config.json").read_text()) for n in names}
    keys = ["bits", "group_size", "mode", "granularity", "x"]
    modes = ["balanced", "affine", "palette", "mxfp4", "mxfp8", "nvfp4", "tensor", "row", "group"]
    sizes = [1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 10**300]

    def entry(rng: np.random.Generator) -> object:
        if rng.random() < 0.2:
            return some_value(rng)
        values = [pick(rng, pick(rng, [modes, sizes])) for _ in keys]
        values = [some_value(rng) if rng.random() < 0.1 else value for value in values]
        return {k: v for k, v in zip(keys, values, strict=True) if rng.random() < 0.4}

    def changed(rng: np.random.Generator) -> Case:
        name = pick(rng, names)
        folder, model = folders[name]
        values = json.loads(json.dumps(configs[name]))
        quantization = values.get("quantization", {})
        layer = pick(rng, ["model.embedding", "model.layers.0.mlp.up_proj", "model.layers", ""])
        values["quantization"] = dict(quantization)
        if rng.random() < 0.7:
            values["quantization"][layer] = entry(rng)
        if rng.random() < 0.4:
            values["quantization"] |= {
                pick(rng, keys): pick(rng, [*modes, *sizes, some_value(rng)])
            }
        text = json.dumps(values)

        def run() -> None:
            (folder / "config.json").write_text(text)
            check_loads_right(folder, answers[name], model)

        return Case(f"{name}: {text}", run)

    run_cases(changed, rng, share(0.03))


def test_overrides_of_values(folders, rng):
    folder, model = folders["float"]
    # Another model_type would have mlx-lm imported, which takes seconds.
    keys = [*sorted(model.args.to_dict().keys() - {"model_type"}), "quantization", "x"]

    def overridden(rng: np.random.Generator) -> Case:
        values = {pick(rng, keys): some_value(rng) for _ in range(int(rng.integers(1, 3)))}
        if rng.random() < 0.1:
            values = pick(rng, [[1], 3, {1: 2}, {None: 1}])

        def run() -> None:
            loaded, *_ = load(folder, model_config=values)
            raise AssertionError(f"a folder without a tokenizer was loaded: {loaded}")

        return Case(repr(values)[:2000], run)

    run_cases(overridden, rng, share(0.01))
    assert mx.isfinite(logits(load_model(folder))).all().item()

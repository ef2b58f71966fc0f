"""Damaged and hostile `config.json` files, and overrides of their values."""

import json

from afm_mlx.loading.load import load
from afm_mlx.measure.describe import describe_folder
from tests.hostile.file_mutations import changed_json, pick, some_value
from tests.hostile.folders import CONFIG, check_loads_right
from tests.hostile.harness import Case, run_cases


def test_changed_configs_give_right_answers_or_one_error(folders, rng):
    configs = {name: folder.values for name, folder in folders.items()}

    def changed(rng):
        name = pick(rng, list(folders))
        text, facts = changed_json(rng, configs[name]), rng.random() < 0.2
        if facts and rng.random() < 0.5:
            text = text.replace("afm7", "llama")

        def run():
            path = folders[name].path
            (path / "config.json").write_text(text, errors="replace")
            if facts:
                describe_folder(path)
            else:
                check_loads_right(folders[name])

        return Case(f"{name}: {text}", run)

    run_cases(changed, rng, 0.11)


def test_changed_layers_quantization(folders, rng):
    """Entries of single layers, which overrule the common keys."""
    configs = {name: folder.values for name, folder in folders.items()}
    keys = ["bits", "group_size", "mode", "granularity", "x"]
    modes = ["balanced", "affine", "palette", "mxfp4", "mxfp8", "nvfp4", "tensor", "row", "group"]
    sizes = [1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 10**300]
    layers = ["model.embedding", "model.layers.0.mlp.up_proj", "model.layers", ""]

    def value(rng):
        return some_value(rng) if rng.random() < 0.1 else pick(rng, pick(rng, [modes, sizes]))

    def changed(rng):
        name = pick(rng, list(folders))
        quantization = dict(configs[name].get("quantization", {}))
        if rng.random() < 0.7:
            entry = {key: value(rng) for key in keys if rng.random() < 0.4}
            entry = some_value(rng) if rng.random() < 0.2 else entry
            quantization[pick(rng, layers)] = entry
        if rng.random() < 0.4:
            quantization[pick(rng, keys)] = value(rng)
        text = json.dumps(configs[name] | {"quantization": quantization})

        def run():
            (folders[name].path / "config.json").write_text(text)
            check_loads_right(folders[name])

        return Case(f"{name}: {text}", run)

    run_cases(changed, rng, 0.03)


def test_overrides_of_values(folders, rng):
    """Of a folder without a tokenizer, which is refused at the latest for that."""
    # Another model_type would have mlx-lm imported, which takes seconds.
    keys = [*sorted(CONFIG.to_dict().keys() - {"model_type"}), "quantization", "x"]

    def overridden(rng):
        values = {pick(rng, keys): some_value(rng) for _ in range(int(rng.integers(1, 3)))}
        if rng.random() < 0.1:
            values = pick(rng, [[1], 3, {1: 2}, {None: 1}])

        def run():
            raise AssertionError(f"was loaded: {load(folders['float'].path, model_config=values)}")

        return Case(repr(values), run)

    run_cases(overridden, rng, 0.01)
    check_loads_right(folders["float"])

"""Damaged and hostile weight files and indices, loaded, described and converted."""

import json
import shutil

from afm_mlx.checkpoint.weights import INDEX_NAME
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.mlx_lm import write_mlx_lm
from afm_mlx.loading.load import load_model
from afm_mlx.measure.describe import describe_folder
from tests.hostile.file_mutations import (
    changed_bytes,
    changed_json,
    changed_safetensors,
    pick,
    read_safetensors,
)
from tests.hostile.folders import check_loads_right, replaced
from tests.hostile.harness import Case, run_cases


def describe(folder):
    describe_folder(folder.path)


def convert(folder):
    (folder.path / "tokenizer.model").write_bytes(b"")
    out = folder.path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    write_mlx_lm(folder.path, out, "out", ConversionOptions())
    load_model(out)


def test_changed_weights_give_right_answers_or_one_error(folders, rng):
    def changed(rng):
        name = pick(rng, list(folders))
        path = pick(rng, sorted(folders[name].path.glob("*.safetensors")))
        content = changed_safetensors(rng, *read_safetensors(path))
        way = pick(rng, [check_loads_right] * 8 + [describe, convert])

        def run():
            with replaced(path, content):
                way(folders[name])

        return Case(f"{way.__name__} {name}: {content[8:1500]!r}", run)

    run_cases(changed, rng, 0.12)


def test_changed_indices_give_right_answers_or_one_error(folders, rng):
    folder = folders["halves"]
    path = folder.path / INDEX_NAME
    whole = path.read_text()

    def changed(rng):
        if rng.random() < 0.8:
            content = changed_json(rng, json.loads(whole)).encode(errors="replace")
        else:
            content = changed_bytes(rng, whole.encode())

        def run():
            path.write_bytes(content)
            check_loads_right(folder)

        return Case(repr(content[:1500]), run)

    run_cases(changed, rng, 0.03)

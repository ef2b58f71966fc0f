"""Damaged and hostile weight files and indices, loaded, described and converted."""

import json
import shutil

import numpy as np
import pytest

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
from tests.hostile.folders import check_loads_right, logits, write_folders
from tests.hostile.harness import Case, run_cases, share


@pytest.fixture
def folders(tmp_path, rng):
    """Folders, what they hold, and the right logits."""
    found = {}
    for name, path in write_folders(tmp_path, rng).items():
        model = load_model(path)
        found[name] = path, model, logits(model)
    return found


def test_changed_weights_give_right_answers_or_one_error(folders, rng, tmp_path):
    def changed(rng: np.random.Generator) -> Case:
        name = pick(rng, list(folders))
        folder, model, right = folders[name]
        path = pick(rng, sorted(folder.glob("*.safetensors")))
        whole = path.read_bytes()
        content = changed_safetensors(rng, *read_safetensors(path))
        way = pick(rng, ["load"] * 8 + ["describe", "convert"])

        def run() -> None:
            path.write_bytes(content)
            try:
                if way == "load":
                    check_loads_right(folder, right, model)
                elif way == "describe":
                    describe_folder(folder)
                else:
                    _convert(folder, tmp_path / "out")
            finally:
                path.write_bytes(whole)

        return Case(f"{way} {name}: {content[8:1500]!r}", run)

    run_cases(changed, rng, share(0.12))


def _convert(folder, out):
    """What can be converted can be loaded."""
    (folder / "tokenizer.model").write_bytes(b"")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    write_mlx_lm(folder, out, "out", ConversionOptions())
    load_model(out)


def test_changed_indices_give_right_answers_or_one_error(folders, rng):
    folder, model, right = folders["halves"]
    path = folder / INDEX_NAME
    whole = path.read_text()

    def changed(rng: np.random.Generator) -> Case:
        if rng.random() < 0.8:
            content = changed_json(rng, json.loads(whole)).encode(errors="replace")
        else:
            content = changed_bytes(rng, whole.encode())

        def run() -> None:
            path.write_bytes(content)
            check_loads_right(folder, right, model)

        return Case(repr(content[:1500]), run)

    run_cases(changed, rng, share(0.03))

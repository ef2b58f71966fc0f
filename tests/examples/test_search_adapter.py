"""The adapter for embeddings that the package carries: its pairs, its figures, and the script that makes it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import afm_mlx
from afm_mlx.adapters.adapter_folder import TENSORS_NAME, EmbeddingUse, load_adapter
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.loading.resolve import resolve_model

EXAMPLES = Path(__file__).parents[2] / "examples"
import questions  # noqa: E402

FOLDER = resolve_model("afm-nano") / "adapters" / "search"


@pytest.fixture
def build() -> ModuleType:
    """The script, whose constants a test may change."""
    path = EXAMPLES / "adapters" / "build_search.py"
    spec = importlib.util.spec_from_file_location("build_search", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take(seed: int, split: str = "train", count: int = 60) -> list[dict[str, Any]]:
    return list(itertools.islice(questions.pairs(seed, split), count))


def test_equal_seeds_give_equal_pairs(seed, capsys):
    assert take(seed) == take(seed)
    assert take(seed) != take(seed + 1)
    assert take(seed) != take(seed, "valid")
    questions.main(["60", "--seed", str(seed)])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == take(seed)


def test_values_of_the_held_out_pairs_never_occur_in_training(seed, drawn):
    for split in ("train", "valid"):
        take(seed, split, 600)
    take(seed, "test", 200)
    assert len(drawn["train"]) > 500
    assert len(drawn["test"]) > 100
    assert not drawn["train"] & drawn["test"]


def test_a_question_has_one_answer(seed):
    """Neither a question nor a sentence comes twice, so that recall has one right answer for each."""
    for split, count in (("train", 2000), ("test", 200)):
        pairs = take(seed, split, count)
        for key in ("query", "positive"):
            assert len({pair[key] for pair in pairs}) == count
        sentences = {pair["positive"] for pair in pairs}
        assert sum(pair["negative"][0] in sentences for pair in pairs) >= count - 2
        assert all(pair["negative"] != [pair["positive"]] for pair in pairs)


def test_every_relation_is_about_its_subject(slots):
    for kind, relations in questions.RELATIONS.items():
        assert len(relations) >= 3
        for relation in relations:
            for question in relation.questions:
                assert slots(question) == {kind}
            values = [slots(sentence) for sentence in relation.sentences]
            assert all(found == values[0] and kind in found for found in values)
            assert len(values[0]) == 2
    every = [r for relations in questions.RELATIONS.values() for r in relations]
    for texts in ([r.questions for r in every], [r.sentences for r in every]):
        wordings = [text for each in texts for text in each]
        assert len(set(wordings)) == len(wordings)


def test_the_shipped_adapter_finds_the_sentence_that_answers():
    """Of 200; also by the first 64 numbers of each vector. The model alone finds few."""
    model, tokenizer = afm_mlx.load("afm-nano")
    pool = afm_mlx.AdapterPool(model)
    pool.register("search", FOLDER)
    held_out = take(0, "test", 200)
    texts = [[pair[key] for pair in held_out] for key in ("query", "positive")]

    def recalls(**options):
        asked = afm_mlx.embed(model, tokenizer, texts[0], queries=True, **options)
        there = afm_mlx.embed(model, tokenizer, texts[1], **options)
        for n in (None, 64):
            # A query's own length changes no order; the lengths of the texts do.
            cut = there[:, :n] / np.linalg.norm(there[:, :n], axis=1, keepdims=True)
            yield np.mean((asked[:, :n] @ cut.T).argmax(1) == np.arange(200))

    whole, cut = recalls(adapters=pool, adapter="search")
    assert whole >= 0.85
    assert cut >= whole - 0.05
    assert max(recalls(pooling="last")) < 0.2


def test_the_shipped_adapter_fits_the_embedded_model():
    model, _ = afm_mlx.load("afm-nano")
    tensors, config = load_adapter(FOLDER)
    assert config.base_model_fingerprint == base_model_fingerprint(model)
    assert config.embedding == EmbeddingUse("last")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"mlx.core.float16"}
    assert (FOLDER / TENSORS_NAME).stat().st_size < 1_000_000


def build_small(build, monkeypatch, out, seed, sizes, *argv) -> Path:
    monkeypatch.setattr(build, "SIZES", dict(zip(("train", "valid", "test"), sizes, strict=True)))
    assert build.main(["--out", str(out), "--seed", str(seed), *argv]) == 0
    return out / "adapters" / "search"


def test_one_command_makes_an_adapter_and_measures_it(build, monkeypatch, tmp_path, seed, capsys):
    argv = (build, monkeypatch, tmp_path, seed, (8, 4, 6), "--iters", "1")
    folder = build_small(*argv)
    assert {file.name for file in folder.iterdir()} == {
        TENSORS_NAME,
        "adapter_config.json",
        "README.md",
    }
    card = (folder / "README.md").read_text()
    assert not re.search(r"@[A-Z_]+@", card)
    assert card in capsys.readouterr().out
    assert len(re.findall(r"^\| with.*%", card, re.MULTILINE)) == 3
    _, config = load_adapter(folder)
    assert config.embedding == EmbeddingUse("last")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("run/**/*.safetensors")}
    assert before
    assert build_small(*argv) == folder
    assert before == {file: file.stat().st_mtime_ns for file in before}


@pytest.mark.slow
def test_a_shorter_training_learns_most_of_it(build, monkeypatch, tmp_path, capsys):
    folder = build_small(build, monkeypatch, tmp_path, 1, (2000, 100, 200), "--iters", "60")
    rows = re.findall(
        r"^\| (with.*?) \| ([\d.]+)%", (folder / "README.md").read_text(), re.MULTILINE
    )
    figures = {name: float(percent) for name, percent in rows}
    assert figures["with it"] > 40 > 2 * figures["without it, `last`"]

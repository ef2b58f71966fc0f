"""From the trained checkpoint to the folder that ships: data, variants, the report, and the package."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("tamm", reason="the example trains with tamm: pip install '.[tamm]'")
pytest.importorskip("sentencepiece")

import package
import quality
import quantize
import tasks
import torch
import train
import variants
import write_data
from tamm.utils import json as tamm_json

import afm_mlx
from afm_mlx.adapters.lora import add_lora, lora_layers, save_lora
from afm_mlx.checkpoint.toolkit_checkpoint import map_keys
from afm_mlx.cli.arguments import parse
from afm_mlx.loading.load import load_model
from afm_mlx.measure.perplexity import cut, load_documents, token_losses
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.training.data.samples import load_split
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.compare import assert_parity
from tests.tools.models import random_config, tamm_logits, tamm_model

SIZES = {
    "vocab_size": 1000,
    "hidden_dim": 64,
    "num_layers": 3,
    "num_kv_reuse_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 2.0,
    "rope_theta": 10000.0,
}
PACKED, ADAPTED = "qat-row", "recovery-row"


@pytest.fixture
def source(rng, tmp_path, spm, monkeypatch) -> Path:
    """A folder as build.py leaves it, of a tiny model with random weights, and a little data."""
    for name, value in SIZES.items():
        monkeypatch.setitem(train.MODEL_ARGS, name, value)
    source = tmp_path / "nano"
    checkpoint = source / "checkpoint"
    checkpoint.mkdir(parents=True)
    shutil.copy(spm, checkpoint / "tokenizer.model")
    model = tamm_model(random_config(rng, **SIZES), rng)
    torch.save(model.state_dict(), checkpoint / "base-model.pt")
    config = tamm_json.dumps(train.model_config(), indent=2)
    (checkpoint / "base-model-config.json").write_text(config)

    test = tasks.test_samples(int(rng.integers(1 << 30)), 1)
    lines(source / "evaluation.jsonl", *test[:2])
    texts = [
        {"text": text} for text in ("Read the words of a file.\n\n" * 40, "Return it.", "x = 1")
    ]
    lines(source / "heldout.jsonl", *texts)
    prompt = rng.integers(5, SIZES["vocab_size"], 12).tolist()
    (source / "golden.json").write_text(json.dumps([{"prompt": prompt, "tokens": []}]))
    (source / "data").mkdir()
    lines(source / "data" / "train.jsonl", *texts)
    return source


@pytest.fixture
def packed(source) -> Path:
    """The same with float weights, with packed ones, and with a random adapter on these."""
    assert quantize.main(["ptq", "--source", str(source), "--only", "float", "balanced-2-row"]) == 0
    models = source / "models"
    (models / "balanced-2-row").rename(models / PACKED)
    model = add_lora(load_model(models / PACKED), rank=4, scale=0.5)
    for layer in lora_layers(model).values():
        for _, b in layer.pairs:
            b += mx.random.normal(b.shape)
    save_lora(model, models / ADAPTED, models / PACKED)
    return source


# -- data


def test_lines_are_seeded_and_have_the_share_of_texts(seed, drawn):
    texts = [f"Text {i}." for i in range(500)]
    train_lines, valid = write_data.draw_lines(texts, seed, 600, 100)
    assert (train_lines, valid) == write_data.draw_lines(texts, seed, 600, 100)
    assert train_lines != write_data.draw_lines(texts, seed + 1, 600, 100)[0]
    assert (len(train_lines), len(valid)) == (600, 100)
    found, held = ([x["text"] for x in part if "text" in x] for part in (train_lines, valid))
    assert len(found) == len(set(found)) == round(600 * write_data.TEXT_SHARE)
    assert len(held) == round(100 * write_data.TEXT_SHARE)
    assert not set(found) & set(held)
    chats = [line for line in train_lines if "messages" in line]
    assert all(set(line) <= {"messages", "tools"} for line in chats)
    assert any("tools" in line for line in chats)
    assert drawn["train"]
    assert not drawn["test"]


def test_few_texts_repeat_evenly(seed):
    texts = [f"Text {i}." for i in range(20)]
    drawn, valid = write_data.draw_lines(texts, seed, 300, 100)
    counts = [sum(line.get("text") == text for line in drawn) for text in texts]
    used = [count for count in counts if count]
    assert sum("text" in line for line in valid) == len(texts) - len(used) == 2
    assert max(used) - min(used) <= 1


def test_the_script_writes_what_training_reads(source, seed, monkeypatch, capsys):
    words = ("Return the sum of two numbers.", "A comment about them.", "Held-out words.")
    texts = write_data.docstrings.Texts(*([text] * 10 for text in words))
    monkeypatch.setattr(write_data.docstrings, "gather", lambda: texts)
    out = source / "written"
    argv = ["--source", str(source), "--out", str(out), "--seed", str(seed), "--samples", "200"]
    monkeypatch.setattr(sys, "argv", ["write_data.py", *argv])
    write_data.main()
    assert "200 lines" in capsys.readouterr().out
    assert "Held-out" not in (out / "train.jsonl").read_text() + (out / "valid.jsonl").read_text()
    tokenizer = load_tokenizer(source / "checkpoint")
    samples = load_split(out, "train", tokenizer, max_seq_length=2048)
    assert len(samples) == 200
    with pytest.raises(SystemExit):
        write_data.main()
    assert "exists already" in capsys.readouterr().err


def test_chats_have_tamms_tokens_and_labels(seed, spm, tmp_path, preprocessor):
    """What `afm-mlx qat` reads from the file is what the float model was trained on."""
    chats = list(itertools.islice(map(write_data._chat_line, tasks.training_samples(seed)), 30))
    lines(tmp_path / "train.jsonl", *chats)
    ours = load_split(tmp_path, "train", load_tokenizer(spm.parent), max_seq_length=4096)
    for chat, sample in zip(chats, ours, strict=True):
        ids, labels = tasks.encode(preprocessor, chat)
        assert list(sample.tokens) == ids
        # tamm's labels stand where their token is predicted, our weights where it is.
        assert [label != -100 for label in labels[:-1]] == [w == 1 for w in sample.weights[1:]]


# -- variants


def test_every_command_is_one_of_the_program(tmp_path):
    source = tmp_path / "a folder"
    for variant in variants.VARIANTS:
        command, *argv = variants.arguments(variant, source, tmp_path / "data")
        assert not any("{" in word for word in argv)
        args = parse(command, importlib.import_module(f"afm_mlx.cli.{command}"), argv)
        out = {"convert": "mlx_path", "qat": "save_path", "lora": "adapter_path"}[command]
        assert Path(getattr(args, out)) == variants.folder(variant.name, source), variant.name
        assert (variant.base is not None) == (command == "lora")
        if variant.base:
            assert Path(args.model) == variants.folder(variant.base, source)


@pytest.fixture
def run(source, monkeypatch):
    """A function that makes one variant; returns the script's status, and the commands it ran."""
    commands = []
    monkeypatch.setattr(quantize.cli, "main", lambda argv: commands.append(argv) or 0)

    def run(stage, variant):
        commands.clear()
        status = quantize.main([stage, "--source", str(source), "--only", variant])
        return status, [*commands]

    return run


def make_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_what_exists_is_kept_and_what_was_interrupted_goes_on(source, run, capsys):
    models = source / "models"
    assert run("qat", "qat-row") == (2, [])
    assert "needs float; quantize.py ptq makes it" in capsys.readouterr().err
    make_file(models / "float" / "config.json")
    for stage, name, command, place in (
        ("qat", "qat-row", "qat", models / "qat-row-run"),
        ("recover", "recovery-row", "lora", models / "recovery-row" / "run"),
    ):
        status, [argv] = run(stage, name)
        assert (status, argv[0], "--resume" in argv) == (0, command, False)
        make_file(place / "run.json")
        status, [argv] = run(stage, name)
        assert argv[-1] == "--resume"
        make_file(models / "qat-row" / "config.json")
    assert run("qat", "qat-row") == (0, [])


def test_a_command_that_fails_ends_the_stage(source, monkeypatch):
    commands = []
    monkeypatch.setattr(quantize.cli, "main", lambda argv: commands.append(argv) or 130)
    assert quantize.main(["ptq", "--source", str(source)]) == 130
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("missing", "words"), [("checkpoint", "build.py makes it"), ("data", "write_data.py makes it")]
)
def test_missing_inputs_are_named(source, capsys, missing, words):
    shutil.rmtree(source / missing)
    assert quantize.main(["ptq", "--source", str(source)]) == 2
    assert words in capsys.readouterr().err


# -- report


def test_the_report_measures_each_variant_once(packed, monkeypatch):
    pytest.importorskip("matplotlib")
    measured = []
    measure = quality.measure

    def counting(model, adapter, *rest):
        measured.append((adapter or model).name)
        return measure(model, adapter, *rest)

    monkeypatch.setattr(quality, "measure", counting)
    quality.report(packed)
    quality.report(packed)
    assert measured == ["float", PACKED, ADAPTED]
    rows = json.loads((packed / "report" / "quality.json").read_text())["variants"]
    assert [row["name"] for row in rows] == measured
    assert (packed / "report" / "quality.png").read_bytes().startswith(b"\x89PNG")

    whole, two, adapted = rows
    assert (whole["linear_bits"], whole["embedding_bits"]) == (32, 32)
    # A float32 scale for each row, of 64 or 128 codes.
    assert 2.25 < two["linear_bits"] < 2.5
    assert two["embedding_bits"] == 4.5
    assert adapted["weight_bytes"] == two["weight_bytes"]
    assert adapted["adapter_bytes"] > 0 == two["adapter_bytes"]
    assert whole["perplexity"] != two["perplexity"] != adapted["perplexity"]
    table = (packed / "report" / "quality.md").read_text().splitlines()
    cells = [line.count("|") for line in table if line.startswith("|")]
    assert len(set(cells)) == 1
    assert len(cells) == 2 + len(rows)
    assert table[-1].startswith("Within 2 points of float on every task, and 5% in perplexity: ")

    config = packed / "models" / PACKED / "config.json"
    config.write_text(config.read_text() + "\n")
    quality.report(packed)
    assert measured[3:] == [PACKED, ADAPTED], "an adapter's figures depend on its base"


def test_perplexity_leaves_out_the_first_token_of_each_text(packed):
    folder = packed / "models" / "float"
    figures = quality.measure(folder, None, packed)
    model, tokenizer = afm_mlx.load(folder)
    documents = load_documents(packed / "heldout.jsonl", tokenizer)
    assert max(map(len, documents)) > 512, "a text of several pieces must be among them"
    losses = [token_losses(model, tokenizer, cut([document])) for document in documents]
    later = np.concatenate([each[1:] for each in losses])
    assert figures["perplexity"] == pytest.approx(np.exp(later.mean()), rel=1e-4)
    assert figures["perplexity_of_all"] == pytest.approx(
        np.exp(np.concatenate(losses).mean()), rel=1e-4
    )
    assert figures["tokens"] == len(later) == sum(len(d) - 2 for d in documents)


@each(
    ("accuracy", "perplexity", "holds"),
    [(0.98, 52.4, True), (0.96, 50.0, False), (1.0, 52.6, False), (1.0, 40.0, True)],
)
def test_the_goal_is_two_points_and_five_percent(accuracy, perplexity, holds):
    reference = {"tasks": {"a": 1.0, "b": 0.5}, "perplexity": 50.0}
    row = {"tasks": {"a": accuracy, "b": 0.6}, "perplexity": perplexity}
    assert quality.reaches_goal(row, reference) == holds
    assert quality.distance(row, reference)[0] == pytest.approx(100 * accuracy - 100)


# -- package


def test_the_package_has_the_same_weights_and_their_figures(packed, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    model, adapter = packed / "models" / PACKED, packed / "models" / ADAPTED
    out = tmp_path / "shipped"
    paths = ["--source", packed, "--model", model, "--adapter", adapter, "--out", out]
    monkeypatch.setattr(sys, "argv", ["package.py", *map(str, paths)])
    quality.report(packed, limit=1)
    with pytest.raises(SystemExit):
        package.main()
    assert "run `quantize.py report`" in capsys.readouterr().err
    quality.report(packed)
    package.main()

    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    loaded, _ = afm_mlx.load(out, adapter_path=str(out / "adapters" / "recovery"))
    assert loaded.args.context_length == 1024
    card = (out / "README.md").read_text()
    assert "@" not in card
    assert "PYTHON SOFTWARE FOUNDATION" in (out / "LICENSE-PYTHON.txt").read_text()
    assert "of rank 4" in card
    rows = json.loads((packed / "report" / "quality.json").read_text())["variants"]
    line = next(line for line in card.splitlines() if line.startswith("| perplexity"))
    assert line.split("|")[2:-1] == [f" {row['perplexity_of_all']:.1f} " for row in rows]
    for golden in (out / "golden.json", out / "adapters" / "recovery" / "golden.json"):
        assert [len(each["tokens"]) for each in json.loads(golden.read_text())] == [32]


def test_golden_weights_are_those_that_ship(packed, rng):
    """tamm with the dequantized weights gives the logits of our engine, with and without the adapter."""
    model, adapter = packed / "models" / PACKED, packed / "models" / ADAPTED
    checkpoint = packed / "checkpoint" / "base-model.pt"
    forget = {name: torch.ones_like(t) for name, t in torch.load(checkpoint).items()}
    torch.save(forget, checkpoint)
    state = package.shipped_state(model, packed)
    for path in (None, str(adapter)):
        if path is not None:
            package.add_adapter(state, adapter, map_keys(state, "test"))
        reference = train.model_config().create_model().eval()
        reference.load_state_dict(state)
        ours, _ = afm_mlx.load(model, adapter_path=path)
        prompts = rng.integers(1, ours.args.vocab_size, (32, 1, 3))
        assert_parity(
            lambda tokens, model=ours: model(mx.array(tokens)),
            lambda tokens, model=reference: tamm_logits(model, tokens),
            prompts,
            1e-3,
            ties=0.02,
        )

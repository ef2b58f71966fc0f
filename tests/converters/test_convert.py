"""What `convert` takes, and that it leaves a whole folder or nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import ModelCard
from safetensors import safe_open

from afm_mlx.checkpoint import weights as weights_module
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.tokenizers import train_tiny_spm

ROOT = Path(__file__).parents[2]


def test_the_folder(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    folder = convert(checkpoint.folder, tmp_path / "deep" / "out")
    assert folder == tmp_path / "deep" / "out"
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "tokenizer.json",
        "README.md",
        "adapters",
    }
    text = (folder / "config.json").read_text()
    assert text == json.dumps(json.loads(text), indent=4, sort_keys=True)
    config = ModelConfig.from_file(folder / "config.json")
    assert config.num_layers == checkpoint.shape["num_layers"]
    ends = load_tokenizer(folder).eos_token_ids
    assert set(json.loads(text)["eos_token_id"]) == ends

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    arrays = load_weights(folder)
    assert index["metadata"] == {
        "total_size": sum(array.nbytes for array in arrays.values()),
        "total_parameters": config.num_parameters,
    }
    with safe_open(folder / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "mlx"}

    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "mlx"
    assert "mlx" in card.data.tags
    assert "licence" in card.text
    assert "`adapters/a`" in card.text
    assert str(tmp_path) not in card.text


def test_progress_ends_at_all_of_it(make_checkpoint, tmp_path):
    calls = []
    folder = convert(
        make_checkpoint().folder, tmp_path / "out", progress=lambda *args: calls.append(args)
    )
    total = sum(array.nbytes for array in load_weights(folder).values())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {of for _, of in calls} == {total}
    assert calls[-1][0] == total


def test_nothing_is_printed(make_checkpoint, tmp_path, capfd):
    convert(make_checkpoint(adapters={"a": {"rank": 4}}).folder, tmp_path / "out")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_what_the_tokenizer_loses_is_a_warning(make_checkpoint, tmp_path):
    """This one changes text before it splits it, which `tokenizer.json` can't follow."""
    checkpoint = make_checkpoint()
    train_tiny_spm(
        checkpoint.folder / "tokenizer.model",
        "unigram",
        vocab_size=500,
        normalization_rule_name="nmt_nfkc_cf",
        user_defined_symbols=["<n>"],
    )
    with pytest.warns(UserWarning, match=r"tokenizer\.json was not written"):
        folder = convert(checkpoint.folder, tmp_path / "out")
    assert not (folder / "tokenizer.json").exists()


def test_an_output_that_exists(tmp_path):
    """It is refused before the source is looked at: this one does not exist."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for out in ("folder", "file", "dangling"):
        with pytest.raises(AFMError, match=f"{out} exists already"):
            convert(tmp_path / "no-such-source", tmp_path / out)


def test_options_that_are_not_allowed(tmp_path):
    for options, words in (
        ({"dtype": "int8"}, "float16, bfloat16, float32"),
        ({"to": "gguf"}, "afm-mlx, mlx-lm"),
    ):
        with pytest.raises(AFMError, match=words):
            convert(tmp_path, tmp_path / "out", **options)


def test_sources_that_are_nothing(tmp_path):
    cases = [
        ("no-such-folder", None, "no-such-folder"),
        ("empty", {}, "holds nothing"),
        ("other", {"notes.txt": "hello"}, "holds notes.txt"),
        ("broken", {"config.json": "{"}, "does not say what model"),
        ("list", {"config.json": "[]"}, "does not say what model"),
        ("nameless", {"config.json": "{}"}, "does not say what model"),
        ("binary", {"config.json": "\x00\x01"}, "does not say what model"),
        (
            "alone",
            {"config.json": '{"__tamm_type__": "models:AFMTextV7Config"}'},
            "toolkit checkpoint",
        ),
        ("zoo", {"config.json": '{"model_type": "no_such_model"}'}, "no_such_model"),
        ("text.pt", "hello", "no PyTorch checkpoint"),
        ("model.safetensors", "\x08" + 7 * "\0" + "{}      ", "no PyTorch checkpoint"),
    ]
    for name, files, words in cases:
        if isinstance(files, dict):
            (tmp_path / name).mkdir()
            for file, text in files.items():
                (tmp_path / name / file).write_text(text)
        elif files is not None:
            (tmp_path / name).write_text(files)
        with pytest.raises(AFMError, match=words):
            convert(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing(make_checkpoint, tmp_path, listing):
    checkpoint = make_checkpoint()
    before = listing(tmp_path)

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint.folder, tmp_path / "out", progress=interrupt)
    assert listing(tmp_path) == before


def test_too_little_room_is_seen_first(make_checkpoint, tmp_path, listing, monkeypatch):
    checkpoint = make_checkpoint()
    before = listing(tmp_path)
    usage = weights_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        weights_module.shutil, "disk_usage", lambda path: usage._replace(free=100_000)
    )
    with pytest.raises(CheckpointError, match="has no room"):
        convert(checkpoint.folder, tmp_path / "out")
    assert listing(tmp_path) == before


# A limit on the size of files makes write() fail in the middle, as a full disk does.
LIMITED = """
import resource, sys
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError
for limit in sys.argv[3:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    try:
        convert(sys.argv[1], sys.argv[2])
    except AFMError as error:
        print("AFMError:", error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of this kind")
def test_a_disk_that_fills_up(make_checkpoint, tmp_path, listing):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 32}})
    before = listing(tmp_path)
    # Within the weights, within the tokenizer, and at the first byte.
    limits = ["300000", "1000", "0"]
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, checkpoint.folder, tmp_path / "out", *limits],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert len(lines) == len(limits), result.stdout + result.stderr
    assert all(line.startswith("AFMError:") and "File too large" in line for line in lines)
    assert listing(tmp_path) == before


def test_names_with_spaces_and_other_scripts(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(folder="Моя модель 🙂")
    folder = convert(str(checkpoint.folder), str(tmp_path / "出力 folder"))
    assert load_weights(folder)["model.output_norm.weight"].dtype == mx.float32


def test_the_source_is_not_written_to(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint()
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in checkpoint.folder.iterdir()}
    convert(checkpoint.folder, tmp_path / "out")
    assert before == {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in checkpoint.folder.iterdir()
    }


def test_an_option_that_there_is_not_is_named(make_checkpoint, tmp_path):
    with pytest.raises(TypeError, match="no option 'qbits'"):
        convert(make_checkpoint().folder, tmp_path / "out", quantize=True, qbits=4)
    assert not (tmp_path / "out").exists()

"""What `convert` takes, and that it leaves a whole folder or nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors import safe_open

from afm_mlx.checkpoint import weights as weights_module
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.converters.conftest import SMALL, config_of, listing
from tests.tools.cases import each
from tests.tools.tokenizers import train_tiny_spm

ROOT = Path(__file__).parents[2]


def test_the_folder(make_checkpoint, tmp_path, capfd):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}}, folder="Моя модель 🙂")
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in checkpoint.folder.iterdir()}
    calls = []
    folder = convert(
        str(checkpoint.folder),
        str(tmp_path / "deep" / "出力 folder"),
        progress=lambda *done: calls.append(done),
    )
    assert folder == tmp_path / "deep" / "出力 folder"
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in before} == before
    assert capfd.readouterr() == ("", "")
    others = {"tokenizer.model", "tokenizer.json", "README.md", "adapters"}
    assert {path.name for path in folder.iterdir()} >= others
    text = (folder / "config.json").read_text()
    assert text == json.dumps(json.loads(text), indent=4, sort_keys=True)
    config = ModelConfig.from_file(folder / "config.json")
    assert config.num_layers == SMALL["num_layers"]
    assert set(json.loads(text)["eos_token_id"]) == load_tokenizer(folder).eos_token_ids

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = sum(array.nbytes for array in load_weights(folder).values())
    parameters = config.num_parameters
    assert index["metadata"] == {"total_size": total, "total_parameters": parameters}
    with safe_open(folder / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "mlx"}
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)

    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "mlx"
    assert "mlx" in card.data.tags
    for words in ("licence", "`adapters/a`", "`base-model.pt`", "出力 folder"):
        assert words in card.text
    assert str(tmp_path) not in card.text


def test_what_the_tokenizer_loses_is_a_warning(make_checkpoint, tmp_path):
    """This one changes text before it splits it, which `tokenizer.json` can't follow."""
    checkpoint = make_checkpoint()
    path, options = checkpoint.folder / "tokenizer.model", {"user_defined_symbols": ["<n>"]}
    options["normalization_rule_name"] = "nmt_nfkc_cf"
    train_tiny_spm(path, "unigram", vocab_size=500, **options)
    with pytest.warns(UserWarning, match=r"tokenizer\.json was not written"):
        folder = convert(checkpoint.folder, tmp_path / "out")
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("out", ["folder", "file", "dangling"])
def test_an_output_that_exists_is_refused_before_the_source_is_looked_at(tmp_path, out):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(AFMError, match=f"{out} exists already"):
        convert(tmp_path / "no-such-source", tmp_path / out)


def test_an_option_that_there_is_not_is_named(tmp_path):
    with pytest.raises(TypeError, match="no option 'qbits'"):
        convert(tmp_path, tmp_path / "out", quantize=True, qbits=4)


@each(
    ("name", "files", "words"),
    [
        ("no-such-folder", None, "no-such-folder"),
        ("empty", {}, "holds nothing"),
        ("other", {"notes.txt": "hello"}, "holds notes.txt"),
        ("many", dict.fromkeys("abcdefghi", ""), "holds a, b, c, d, e, f, g, h, ...."),
        ("broken", {"config.json": "{"}, "is not valid JSON"),
        ("list", {"config.json": "[]"}, r"config\.json holds a JSON list; an object is needed\.$"),
        ("nameless", {"config.json": "{}"}, "model_type is None; it names the architecture"),
        ("number", {"config.json": '{"model_type": 7}'}, "model_type is 7; it names"),
        ("alone", {"config.json": '{"__tamm_type__": "AFMTextV7Config"}'}, "toolkit checkpoint"),
        ("zoo", {"config.json": '{"model_type": "no_such_model"}'}, "no_such_model"),
        ("text.pt", "hello", "no PyTorch checkpoint"),
        ("model.safetensors", "\x08" + 7 * "\0" + "{}      ", "no PyTorch checkpoint"),
    ],
)
def test_a_source_that_is_nothing_is_named(tmp_path, name, files, words):
    if isinstance(files, dict):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    elif files is not None:
        (tmp_path / name).write_text(files)
    with pytest.raises(AFMError, match=words):
        convert(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_which_file_of_a_folder_is_converted(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint("one")
    make_checkpoint("two", kv_quant=False)
    with pytest.raises(CheckpointError, match=r"2 \.pt files \(one\.pt, two\.pt\)"):
        convert(checkpoint.folder, tmp_path / "out")
    make_checkpoint("base-model")
    assert config_of(convert(checkpoint.folder, tmp_path / "base"))["kv_bits"] == 8
    two = convert(checkpoint.folder / "two.pt", tmp_path / "two")
    assert config_of(two)["kv_bits"] is None
    checkpoint.config_path.unlink()
    with pytest.raises(CheckpointError, match=r"no config of one\.pt: one of one-config\.json"):
        convert(checkpoint.weights, tmp_path / "out")


def test_an_interrupt_leaves_nothing(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint()
    before = listing(tmp_path)

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint.folder, tmp_path / "out", progress=interrupt)
    assert listing(tmp_path) == before


def test_too_little_room_is_seen_first(make_checkpoint, tmp_path, monkeypatch):
    checkpoint = make_checkpoint()
    before, shutil = listing(tmp_path), weights_module.shutil
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    place = re.escape(str(tmp_path))
    with pytest.raises(
        CheckpointError, match=rf"^{place} has no room: [\d.,]+ MB are needed and 0.1 MB"
    ):
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
def test_a_disk_that_fills_up_leaves_nothing(make_checkpoint, tmp_path):
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

"""Vocabulary files that are damaged, or lack what AFM needs, are named."""

import json
import time

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import HubVocabulary
from tests.tools.cases import each
from tests.tools.tokenizers import train_tiny_spm


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com\n", b"\x0a\xff"])
def test_damaged_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{tmp_path / name}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eos_id": -1}, "no end-of-sequence piece"),
        ({"treat_whitespace_as_suffix": True}, "writes spaces behind words"),
    ],
)
def test_models_of_another_kind(tmp_path, options, words):
    train_tiny_spm(tmp_path / "tokenizer.model", "bpe", **options)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(tmp_path)


@each(
    ("path", "value"),
    [
        (["model", "vocab"], {}),
        (["model", "vocab"], [5]),
        (["model"], None),
        (["added_tokens", 0, "content"], ["x"]),
        (["normalizer"], {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ],
)
def test_hub_files_of_wrong_types(tmp_path, tokenizer_folder, path, value):
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=f"{tmp_path}"):
        load_tokenizer(tmp_path).encode("abc <turn_end>")


def test_a_hub_file_without_a_separator(tmp_path, tokenizer_folder):
    text = (tokenizer_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("</s>", "</other>"))
    with pytest.raises(TokenizerError, match=r"no separator token: neither '</s>'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("normalizer", [{"type": "Prepend", "prepend": "\u2581"}, None])
def test_control_tokens_keep_their_ids_under_other_names(tokenizer_folder, normalizer):
    path = tokenizer_folder / "tokenizer.json"
    content = json.loads(path.read_text()) | {"normalizer": normalizer}
    vocabulary = HubVocabulary(json.dumps(content), path, {})
    ids = [vocabulary.id_of(name) for name in ("<turn_start>", "<turn_end>")]
    renamed = vocabulary.renamed(dict(zip(ids, "\ue000\ue001", strict=True)))
    assert [token for token in renamed.encode("\ue000\ue001") if token in ids] == ids
    assert not set(ids) & set(renamed.encode("<turn_start><turn_end>"))


def test_many_control_tokens_of_a_unigram_file_cost_no_search_each():
    names = [f"x{n}" for n in range(40_000)]
    vocabulary = [["<unk>", 0.0], ["</s>", 0.0], *([name, -9.0] for name in names)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})

    def seconds(control):
        start = time.perf_counter()
        read = HubVocabulary(text, "tokenizer.json", {"control_tokens": control})
        assert sum(map(read.is_hidden, range(read.size))) == len(control)
        return time.perf_counter() - start

    few, many = (min(seconds(control) for _ in range(2)) for control in (names[:1], names[-2000:]))
    assert many < 10 * few

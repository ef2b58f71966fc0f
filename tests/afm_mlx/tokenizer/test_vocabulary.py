"""Tokenizer files: damaged ones, and ones without what AFM needs, are errors that name the file."""

import json
import os
import shutil

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import HubVocabulary, tokenizer_files
from tests.tools.cases import each
from tests.tools.chats import USER
from tests.tools.tokenizers import train_tiny_spm


@each("content", [b"", b"version https://git-lfs.github.com\n", b"\x0a\xff"])
def test_damaged_files(tmp_path, content):
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=f"{tmp_path / name}"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


@each(
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


# A model folder's tokenizer_config.json and chat template


@pytest.fixture
def configured(tmp_path, spm_bpe):
    """A function that loads the tokenizer with a content of tokenizer_config.json, or with its text."""

    def load(content):
        shutil.copy(spm_bpe, tmp_path)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer_config.json").write_text(text)
        return load_tokenizer(tmp_path)

    return load


@pytest.mark.parametrize(
    ("given", "token", "ids"),
    [
        (None, "<turn_end>", {2, 4}),
        ({"content": "<turn_end>"}, "<turn_end>", {2, 4}),
        ("</s>", "<turn_end>", {2, 4}),
        ("<executable_end>", "<executable_end>", {2, 4, 6}),
    ],
)
def test_the_end_of_an_answer(configured, given, token, ids):
    tokenizer = configured({"eos_token": given})
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == (token, ids)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[]", "tokenizer_config.json must be a JSON object, got list"),
        ({"eos_token": "<end>"}, "'<end>' .* is not in the vocabulary"),
        ({"eos_token": "x" * 5000}, "is not in the vocabulary"),
        ({"eos_token": 5}, "'eos_token' of tokenizer_config.json must be"),
        ({"eos_token": {"content": 5}}, "'eos_token' of tokenizer_config.json must be"),
        ({"chat_template": 3}, "'chat_template' in .* got int"),
        ({"chat_template": [5]}, "'chat_template' in .* got list"),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, "'chat_template' in "),
        ({"chat_template": [{"name": "default", "template": ["x"]}]}, "'chat_template' in "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_cannot_be_used(configured, content, words):
    with pytest.raises(TokenizerError, match=words) as error:
        configured(content)
    assert len(str(error.value)) < 700


def test_chat_template_of_the_folder(configured, tmp_path):
    templates = [{"name": "default", "template": "named"}, {"name": "x", "template": "y"}]
    assert configured({"chat_template": templates}).chat_template == "named"
    tokenizer = configured({"chat_template": "config {{ messages[0].content }}"})
    assert tokenizer.apply_chat_template([USER], tokenize=False) == "config Who?"
    (tmp_path / "chat_template.jinja").write_text("</s><turn_start> {{ colour }}<n>\n")
    tokenizer = load_tokenizer(tmp_path)
    # The separator that a template writes out is the one that `encode` puts first.
    text = tokenizer.apply_chat_template([USER], tokenize=False, colour="red")
    assert text == "<turn_start> red<n>"
    assert tokenizer.apply_chat_template([USER])[:2] == [2, 3]


@each("name", "tokenizer.model tokenizer.json tokenizer_config.json chat_template.jinja".split())
def test_files_are_read_within_a_limit_and_pipes_are_none(tokenizer_folder, tmp_path, name):
    for put, says in (
        (lambda path: os.truncate(path, 1 << 40), "bytes that are allowed"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "it is a pipe, and a file is needed"),
    ):
        folder = tmp_path / f"{name}-{says[:2]}"
        shutil.copytree(tokenizer_folder, folder)
        if name == "tokenizer.json":
            (folder / "tokenizer.model").unlink()
        (folder / name).touch()
        put(folder / name)
        with pytest.raises(TokenizerError, match=f"{name} can't be read: .*{says}"):
            load_tokenizer(folder)
        if name != "tokenizer_config.json":  # copied, and read by libraries of others
            with pytest.raises(TokenizerError, match=f"{name} (has|is not a file)"):
                tokenizer_files(folder)
        shutil.rmtree(folder)

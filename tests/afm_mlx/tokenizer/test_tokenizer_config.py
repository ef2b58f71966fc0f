"""What a model folder says of its tokenizer: the end of an answer, the chat template, and errors."""

import json
import os
import shutil

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.tokenizer_config import tokenizer_files
from tests.tools.cases import each
from tests.tools.chats import USER


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
            with pytest.raises(TokenizerError, match=f"{name} (has|is no file)"):
                tokenizer_files(folder)
        shutil.rmtree(folder)

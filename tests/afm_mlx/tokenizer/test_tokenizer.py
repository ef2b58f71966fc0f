"""Ids and text against tamm's tokenizer, and what mlx-lm needs of a tokenizer."""

import json
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.detokenizer import StreamingDetokenizer
from afm_mlx.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tools.tokenizers import MARKERS, is_tie, random_text, train_tiny_spm

TEXTS = ["", "\n", " ", "\n x", *MARKERS, "<turn_start> system<n>a<turn_end>", "\0a", "\u2581a"]


@pytest.fixture(scope="module")
def tokenizer(either_folder):
    return load_tokenizer(either_folder)


@pytest.fixture(scope="module")
def reference(spm_path):
    tamm = pytest.importorskip("tamm.tokenizers.afm", reason="parity needs tamm")
    return tamm.AFMTokenizer(str(spm_path))


def test_encode_equals_tamm(tokenizer, reference, spm_path, either_folder, rng):
    may_tie = "unigram" in str(spm_path) and not (either_folder / "tokenizer.model").exists()
    for text in [*TEXTS, *(random_text(rng) for _ in range(1500))]:
        if text.startswith("</s>") and not (either_folder / "tokenizer.model").exists():
            continue  # the known gap of tokenizer.json: no dummy prefix there
        ids, expected = tokenizer.encode(text), reference.encode(text)
        assert ids == expected or (may_tie and is_tie(spm_path, ids, expected)), text


def test_decode_takes_arrays_and_single_ids(tokenizer, reference):
    assert tokenizer.decode(mx.array([5, 300])) == reference.decode([5, 300])
    assert tokenizer.decode(300) == reference.decode([300])


def test_special_tokens_at_the_start(tokenizer):
    separator = [tokenizer.separator_id]
    for text in ("", "Hello", "\nHello", " <turn_start>"):
        assert tokenizer.encode(text, True) == separator + tokenizer.encode(text)
    # A rendered chat starts at the marker, without the dummy prefix.
    for text in ("<turn_start> user<n>", "<turn_end>"):
        assert tokenizer.encode(text)[0] == tokenizer.convert_tokens_to_ids("\u2581")
        assert tokenizer.encode(text, True) == separator + tokenizer.encode(text)[1:]


def test_control_pieces_in_text_are_text(tokenizer):
    """A user can't write a separator or padding."""
    ids = tokenizer.encode("a </s> <pad> <unk> <0x41>")
    assert not {tokenizer.separator_id, tokenizer.pad_token_id, tokenizer.unk_token_id} & {*ids}
    assert tokenizer.decode(ids) == "a </s> <pad> <unk> <0x41>"


def test_attributes(tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<turn_end>", 4)
    assert tokenizer.eos_token_ids == {4, 2}
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<pad>", "<unk>")
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.separator_id) == (0, 1, 2)
    assert tokenizer.bos_token is None
    assert tokenizer.bos_token_id is None
    assert len(tokenizer) == tokenizer.vocab_size == 1000
    vocabulary = tokenizer.get_vocab()
    assert vocabulary["<n>"] == tokenizer.convert_tokens_to_ids("<n>") == 7
    assert sorted(vocabulary.values()) == list(range(1000))
    names = tokenizer.convert_ids_to_tokens(range(1000))
    assert tokenizer.convert_tokens_to_ids(names) == list(range(1000))
    assert tokenizer.convert_tokens_to_ids("no such piece") is None
    assert tokenizer.all_special_tokens == ["<pad>", "<unk>", "</s>", "<turn_start>", "<turn_end>"]
    assert tokenizer.chat_template == V6_TEMPLATE
    assert (tokenizer.has_chat_template, tokenizer.has_thinking) == (True, False)
    assert tokenizer.tool_call_start_tokens == (5,)
    assert isinstance(tokenizer, Tokenizer)


def test_add_eos_token(either_folder):
    tokenizer = load_tokenizer(either_folder)
    for token in ("<executable_end>", 9, "10"):
        tokenizer.add_eos_token(token)
    assert tokenizer.eos_token_ids == {2, 4, 6, 9, 10}
    for token in ("no such piece", 1000, "-1"):
        with pytest.raises(TokenizerError, match="can't end generation"):
            tokenizer.add_eos_token(token)


def test_text_that_is_not_unicode(tokenizer):
    with pytest.raises(TokenizerError, match=r"'\\udc80' at position 2, half of a surrogate pair"):
        tokenizer.encode("ab\udc80")
    with pytest.raises(TokenizerError, match="got bytes"):
        tokenizer.encode(b"ab")


def test_missing_files(tmp_path):
    with pytest.raises(TokenizerError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"needs tokenizer.model .* or tokenizer.json"):
        load_tokenizer(tmp_path)


def test_damaged_files(tmp_path):
    for name in ["tokenizer.model", "tokenizer.json"]:
        for content in [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x0a\xff"]:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(TokenizerError, match=f"{tmp_path / name}"):
                load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


def test_truncated_model(tmp_path, spm_path, rng):
    model = spm_path.read_bytes()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model[: int(rng.integers(len(model) - 2000))])
    with pytest.raises(TokenizerError, match=f"{path}"):
        load_tokenizer(tmp_path)


def test_model_without_separator(tmp_path):
    train_tiny_spm(tmp_path / "tokenizer.model", "bpe", eos_id=-1)
    with pytest.raises(TokenizerError, match="no end-of-sequence piece"):
        load_tokenizer(tmp_path)


def test_configuration(tmp_path, spm_path):
    shutil.copy(spm_path, tmp_path)
    config = tmp_path / "tokenizer_config.json"

    def eos_of(**content):
        config.write_text(json.dumps(content))
        tokenizer = load_tokenizer(tmp_path)
        return tokenizer.eos_token, tokenizer.eos_token_ids

    assert load_tokenizer(tmp_path).eos_token == "<turn_end>"
    assert eos_of(eos_token={"content": "<turn_end>"}) == ("<turn_end>", {2, 4})
    assert eos_of(eos_token="</s>") == ("<turn_end>", {2, 4})
    assert eos_of(eos_token="<executable_end>") == ("<executable_end>", {2, 4, 6})
    with pytest.raises(TokenizerError, match=r"'<end>' .* is not in the vocabulary"):
        eos_of(eos_token="<end>")
    for content, message in (("{", "not valid JSON"), ("[]", "must be a JSON object")):
        config.write_text(content)
        with pytest.raises(TokenizerError, match=f"{config} .*{message}|{config} {message}"):
            load_tokenizer(tmp_path)


def test_chat_template_of_the_folder(tmp_path, spm_path):
    shutil.copy(spm_path, tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config {{ messages[0].content }}"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "config Hi"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "named"}]}))
    assert load_tokenizer(tmp_path).chat_template == "named"
    config.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(TokenizerError, match=r"'chat_template' in .* got int"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("</s><turn_start> {{ colour }}<n>\n")
    tokenizer = load_tokenizer(tmp_path)
    # The separator that a template writes out is the one that `encode` puts first.
    assert tokenizer.apply_chat_template(messages, tokenize=False, colour="red") == (
        "<turn_start> red<n>"
    )
    assert tokenizer.apply_chat_template(messages)[:2] == [2, 3]


JUNK = [
    ("chat_template", [5]),
    ("chat_template", [{"name": ["default"], "template": "x"}]),
    ("chat_template", [{"name": "default", "template": ["x"]}]),
    ("chat_template", [{"name": "tool_use", "template": "x"}]),
    ("chat_template", {"default": "x"}),
    ("eos_token", 5),
    ("eos_token", ["<turn_end>"]),
    ("eos_token", {"content": 5}),
    ("eos_token", "x" * 5000),
]


def test_configuration_of_wrong_types(tmp_path, spm_bpe):
    for key, value in JUNK:
        shutil.copy(spm_bpe, tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(
            TokenizerError, match=f"{key}.* of tokenizer_config.json|'{key}' in"
        ) as error:
            load_tokenizer(tmp_path)
        assert len(str(error.value)) < 700


def test_configuration_that_is_no_json(tmp_path, spm_bpe):
    for text in ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"]:
        shutil.copy(spm_bpe, tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match="is not valid JSON"):
            load_tokenizer(tmp_path)


def test_hub_file_of_wrong_types(tmp_path, tokenizer_folder):
    for path, value in [
        (["model", "vocab"], 5),
        (["model", "vocab"], {}),
        (["model", "vocab"], [5]),
        (["model"], None),
        (["added_tokens"], [5]),
        (["added_tokens"], [{"content": ["</s>"], "special": True}]),
        (["added_tokens", 0, "content"], ["x"]),
        (["normalizer"], {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        (["decoder"], 3),
    ]:
        content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(TokenizerError, match=f"{tmp_path}"):
            load_tokenizer(tmp_path).encode("abc <turn_end>")


def test_import_is_light():
    """transformers alone would cost more than loading does."""
    heavy = ["transformers", "tokenizers", "sentencepiece", "jinja2", "torch"]
    code = (
        f"import afm_mlx.tokenizer.tokenizer, sys; print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


class ScriptedModel:
    """Stands in for a language model: it answers every prompt of `prompt_length` ids with `answer`."""

    layers = ()

    def __init__(self, prompt_length, answer, vocab_size):
        self.answer, self.vocab_size = answer, vocab_size
        self.seen = -prompt_length

    def make_cache(self):
        return []

    def __call__(self, inputs, cache=None):
        self.seen += inputs.shape[1]
        index = min(max(self.seen, 0), len(self.answer) - 1)
        return mx.where(mx.arange(self.vocab_size) == self.answer[index], 10.0, 0.0)[None, None]


def test_mlx_lm_streams_with_it(tokenizer, rng):
    """`mlx_lm.stream_generate` takes the tokenizer as it is; newlines and indentation survive."""
    mlx_lm = pytest.importorskip("mlx_lm")
    answer = "def f():\n    x = 'é😀'\n     \n  return x <n> < n\n"
    ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    expected_prompt = tokenizer.encode(prompt, add_special_tokens=True)
    model = ScriptedModel(len(expected_prompt), ids, len(tokenizer))
    responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=len(ids) + 5))
    assert "".join(r.text for r in responses) == answer.replace("<n>", "\n")
    assert responses[-1].finish_reason == "stop"
    assert responses[-1].prompt_tokens == len(expected_prompt)


def test_mlx_lm_wrapper_around_it(tokenizer):
    """mlx-lm's own wrapper accepts it, with its detokenizer or with ours."""
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    messages = [{"role": "user", "content": "Hi"}]
    for wrapper in (
        utils.TokenizerWrapper(tokenizer),
        utils.TokenizerWrapper(tokenizer, StreamingDetokenizer, eos_token_ids=[2]),
    ):
        assert wrapper.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
        assert wrapper.eos_token_ids >= {4}
        assert wrapper.has_chat_template
        detokenizer = wrapper.detokenizer
        for token in tokenizer.encode("one two\nthree"):
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == "one two\nthree"

"""A model folder's tokenizer files: stock mlx-lm and transformers get the same ids from them."""

import json

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.chats import TOOL, random_chat
from tests.tools.tokenizers import MARKERS, random_text, same_ids, train_tiny_spm

pytest.importorskip("mlx_lm")


@pytest.fixture(scope="module")
def stock(tokenizer_folder):
    from mlx_lm.utils import load_tokenizer as load_stock

    return load_stock(tokenizer_folder)


def test_stock_encode(tokenizer, stock, spm_path, rng):
    for text in ["", "\n", "\n x", " ", "<turn_start> a", *(random_text(rng) for _ in range(1500))]:
        # Known differences: a lone marker has no dummy prefix; "</s>" in a text is the separator.
        if text in MARKERS[:-1] or "</s>" in text:
            continue
        ids, expected = stock.encode(text, add_special_tokens=False), tokenizer.encode(text)
        assert same_ids(spm_path, ids, expected), text
        assert stock.encode(text) == [tokenizer.separator_id, *ids]


OPENAI = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]  # fmt: skip


def test_stock_chat_template(tokenizer, stock, spm_path, rng):
    for messages in (OPENAI, *(random_chat(rng) for _ in range(10))):
        for arguments in ({"add_generation_prompt": True}, {"tools": [TOOL]}):
            ids = stock.apply_chat_template(messages, **arguments)
            assert same_ids(spm_path, ids, tokenizer.apply_chat_template(messages, **arguments))
            # mlx-lm's command line renders, and encodes in a second step.
            text = stock.apply_chat_template(messages, tokenize=False, **arguments)
            assert stock.encode(text, add_special_tokens=False) == ids
            assert text.startswith(stock.bos_token)
    assert (stock.eos_token, stock.eos_token_ids) == ("<turn_end>", {4})


def test_stock_decode_and_stream(tokenizer, stock, rng):
    for _ in range(300):
        text = random_text(rng).strip(" \n\u2581")
        ids = tokenizer.encode(text)
        if "<pad>" in text or "<unk>" in text or not text:
            continue
        shown = tokenizer.decode(ids)
        assert stock.decode(ids) == shown
        detokenizer = stock.detokenizer
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        if not text.startswith("<n>"):
            assert detokenizer.text == shown


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"allow_whitespace_only_pieces": True},
        {"byte_fallback": False, "character_coverage": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_kinds_of_model_agree_or_say_so(tmp_path, rng, options):
    model_type = str(rng.choice(["bpe", "unigram"]))
    (tmp_path / "toolkit").mkdir()
    path = train_tiny_spm(tmp_path / "toolkit" / "tokenizer.model", model_type, **options)
    folder = tmp_path / "model"
    folder.mkdir()
    warnings = save_tokenizer(path, folder)
    hub = folder / "tokenizer.json"
    if any("tokenizer.json was not written" in warning for warning in warnings):
        assert not hub.exists()
        assert "normalization_rule_name" in options, "only Unicode normalization is known to differ"
        return
    expected = load_tokenizer(folder)
    (folder / "tokenizer.model").unlink()
    tokenizer = load_tokenizer(folder)
    for text in (random_text(rng) for _ in range(500)):
        first, second = tokenizer.encode(text), expected.encode(text)
        if "normalization_rule_name" in options and not text.isascii():
            continue
        if text.strip(" ") not in MARKERS and "</s>" not in text:
            assert same_ids(path, first, second), text


def test_toolkit_configuration(tmp_path, spm_bpe):
    source, folder = tmp_path / "assets", tmp_path / "model"
    source.mkdir()
    folder.mkdir()
    (source / "tokenizer.model").write_bytes(spm_bpe.read_bytes())
    config = source / "tokenizer-config.json"
    content = {
        "__tamm_type__": "tokenizers:AFMTokenizerConfig",
        "user_defined_tokens": ["<new_1>", "<new_2>"],
        "extra_properties": {"eot_id": 6, "something_else": [1, {"deep": None}]},
    }
    config.write_text(json.dumps(content))
    assert save_tokenizer(source, folder) == []
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 1002
    assert tokenizer.encode("a<new_2>")[1:] == [1001]
    assert tokenizer.eos_token == "<executable_end>"

    def fails(message, **changes):
        config.write_text(json.dumps({**content, **changes}))
        with pytest.raises(TokenizerError, match=f"{config}.*{message}"):
            save_tokenizer(source, folder)

    fails("eot_id 5000; the vocabulary's ids are 0 to", extra_properties={"eot_id": 5000})
    fails("repeats pieces .*'<n>'", user_defined_tokens=["<n>"])
    fails("must be a list of strings", user_defined_tokens="<n>")
    fails("only .* AFM's own, is known", text_processor={"replacements": {"\n": "<br>"}})
    for text in ("{", "[" * 100_000):
        config.write_text(text)
        with pytest.raises(TokenizerError, match=f"{config} is not valid JSON"):
            save_tokenizer(source, folder)
    config.write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=f"{config} is not UTF-8"):
        save_tokenizer(source, folder)


def test_missing_or_damaged_source(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.model can't be read"):
        save_tokenizer(tmp_path, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        save_tokenizer(tmp_path, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]

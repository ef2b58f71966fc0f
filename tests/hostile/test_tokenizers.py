"""Hostile tokenizer files: each loads and gives right ids, or is one TokenizerError."""

import copy
import json
import shutil

import pytest

from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.hostile.file_mutations import change_inside, changed_bytes, pick
from tests.hostile.harness import Case, run_cases
from tests.tools.tokenizers import random_text, train_tiny_spm

CHAT = [{"role": "user", "content": "Hi <b> <turn_end> é日本\n"}]
JUNK = [
    None, True, 0, -1, 5, 2**31, 2**63, 10**400, 1e308, float("nan"), "", "x", "<turn_end>", "\u2581", "\ud800",
    "\0", [], [5], [[]], {}, {"content": 5}, {"content": "<turn_end>"}, {"type": "Sequence"}, "x" * 10_000,
    [None] * 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    train_tiny_spm(folder / "tiny.model", "unigram", vocab_size=420)
    save_tokenizer(folder / "tiny.model", folder)
    return folder


@pytest.fixture(scope="module")
def normalizing(tmp_path_factory):
    path = tmp_path_factory.mktemp("normalizing") / "tokenizer.model"
    options = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    return train_tiny_spm(path, "bpe", vocab_size=420, **options)


def use(folder, text):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text, add_special_tokens=True)
    ids += tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    decoded = tokenizer.decode(ids)
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == decoded
    assert tokenizer.all_special_tokens
    assert tokenizer.eos_token_ids


def dumped(value):
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return b"[" * 20_000


def test_hostile_sentencepiece_models(rng, folder, normalizing, tmp_path):
    sources = [(folder / "tokenizer.model").read_bytes(), normalizing.read_bytes()]

    def generate(rng):
        content, text = changed_bytes(rng, pick(rng, sources)), random_text(rng)

        def run():
            (tmp_path / "tokenizer.model").write_bytes(content)
            use(tmp_path, text)

        return Case(f"a tokenizer.model of {len(content)} bytes, for {text!r}", run)

    run_cases(generate, rng, 0.04)


def test_hostile_hub_files(rng, folder, tmp_path):
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    source = (folder / "tokenizer.json").read_bytes()

    def generate(rng):
        text = random_text(rng)
        if rng.integers(4) == 0:
            content = changed_bytes(rng, source)
        else:
            value = json.loads(source)
            for _ in range(int(rng.integers(1, 4))):
                change_inside(rng, value, JUNK, deepest=3000)
            content = dumped(value)

        def run():
            (tmp_path / "tokenizer.json").write_bytes(content)
            use(tmp_path, text)

        return Case(f"tokenizer.json {content[:600]!r} for {text!r}", run)

    run_cases(generate, rng, 0.04)


def test_hostile_configurations(rng, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model, aside = tmp_path / "tokenizer.model", tmp_path / "aside.model"
    source = json.loads((folder / "tokenizer_config.json").read_text())
    source |= {"pad_token": "<pad>", "added_tokens_decoder": {"3": {"content": "<turn_start>"}}}
    templates = ["{{ messages }}", "{% break %}", [{"name": "default", "template": "x"}], *JUNK]

    def generate(rng):
        value = copy.deepcopy(source | {"chat_template": pick(rng, templates)})
        for _ in range(int(rng.integers(1, 5))):
            if rng.integers(3):
                key = pick(rng, ["eos_token", "bos_token", "pad_token", "control_tokens"])
                value[key] = copy.deepcopy(pick(rng, JUNK))
            else:
                change_inside(rng, value, JUNK, deepest=3000)
        content = dumped(value) if rng.integers(4) else changed_bytes(rng, dumped(value))
        hub_only = bool(rng.integers(2))

        def run():
            (tmp_path / "tokenizer_config.json").write_bytes(content)
            if hub_only:
                model.rename(aside)
            try:
                use(tmp_path, "a <turn_end> b")
            finally:
                if hub_only:
                    aside.rename(model)

        return Case(f"tokenizer_config.json {content[:1500]!r}, hub_only={hub_only}", run)

    run_cases(generate, rng, 0.04)

"""Hostile tokenizer files: each loads and gives right ids, or is one TokenizerError."""

import json

import pytest

from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.hostile.file_mutations import pick, place_in
from tests.hostile.harness import Case, run_cases, share
from tests.tools.tokenizers import random_text, train_tiny_spm

CHAT = [{"role": "user", "content": "Hi <b> <turn_end> é日本\n"}]
JUNK = [
    None, True, 0, -1, 5, 2**31, 2**63, 10**400, 1e308, float("nan"), "", "x", "<turn_end>", "\u2581", "\ud800",
    "\0", [], [5], [[]], {}, {"content": 5}, {"content": "<turn_end>"}, {"type": "Sequence"}, "x" * 10_000,
    [None] * 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The four files of a model folder, with a small vocabulary so that a mutation hits something."""
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
    """What a program does with a tokenizer."""
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


def mutated_bytes(rng, content):
    content = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        # The settings are at the end.
        last = len(content) if rng.integers(2) else min(len(content), 300)
        at = len(content) - 1 - int(rng.integers(last))
        kind = int(rng.integers(8))
        if kind < 4:
            content[at] = int(rng.integers(256))
        elif kind == 4:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 5:
            del content[at : at + int(rng.integers(1, 50))]
        elif kind == 6:
            content[at:at] = rng.bytes(int(rng.integers(1, 30)))
        else:
            content[at:at] = content[at : at + int(rng.integers(1, 500))]
    if rng.integers(10) == 0:
        del content[int(rng.integers(len(content))) :]
    return bytes(content)


def spoil(rng, value):
    """Drop, swap, retype or nest something somewhere inside a JSON value."""
    if (place := place_in(rng, value, deeper=6)) is None:
        return
    value, key = place
    kind = int(rng.integers(6))
    if kind == 0:
        del value[key]
    elif kind == 1:
        other = pick(rng, list(value) if isinstance(value, dict) else range(len(value)))
        value[key], value[other] = value[other], value[key]
    elif kind == 2:
        deep = value[key]
        for _ in range(int(rng.integers(1, 3000))):
            deep = [deep] if rng.integers(2) else {"type": deep}
        value[key] = deep
    elif kind == 3 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = pick(rng, JUNK)


def dumped(value):
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return b"[" * 20_000


def model_case(folder, normalizing, tmp_path):
    sources = [(folder / "tokenizer.model").read_bytes(), normalizing.read_bytes()]

    def generate(rng):
        content, text = mutated_bytes(rng, pick(rng, sources)), random_text(rng)

        def run():
            (tmp_path / "tokenizer.model").write_bytes(content)
            use(tmp_path, text)

        return Case(f"a tokenizer.model of {len(content)} bytes, for {text!r}", run)

    return generate


def hub_case(folder, tmp_path):
    source = (folder / "tokenizer.json").read_bytes()
    config = (folder / "tokenizer_config.json").read_bytes()
    # The vocabulary is most of the file, and the rest more likely to be misread.
    rest = {key: value for key, value in json.loads(source).items() if key != "model"}
    model = json.loads(source)["model"]

    def generate(rng):
        text = random_text(rng)
        if rng.integers(4) == 0:
            content = mutated_bytes(rng, source)
        else:
            value = {
                **json.loads(json.dumps(rest)),
                "model": {**model, "vocab": list(model["vocab"])},
            }
            for _ in range(int(rng.integers(1, 4))):
                spoil(
                    rng,
                    pick(rng, [value, value["model"]])
                    if isinstance(value.get("model"), dict)
                    else value,
                )
            content = dumped(value)

        def run():
            (tmp_path / "tokenizer.json").write_bytes(content)
            (tmp_path / "tokenizer_config.json").write_bytes(config)
            use(tmp_path, text)

        return Case(f"tokenizer.json {content[:600]!r} for {text!r}", run)

    return generate


def config_case(folder, tmp_path):
    source = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    templates = [
        "{{ messages }}",
        "{% break %}",
        [{"name": "default", "template": "x"}],
        [5],
        *JUNK,
    ]

    def generate(rng):
        value = {
            **source,
            "pad_token": "<pad>",
            "chat_template": pick(rng, templates),
            "added_tokens_decoder": {"3": {"content": "<turn_start>"}},
        }
        for _ in range(int(rng.integers(1, 5))):
            if rng.integers(3):
                value[pick(rng, ["eos_token", "bos_token", "pad_token", "control_tokens"])] = pick(
                    rng, JUNK
                )
            else:
                spoil(rng, value)
        content = dumped(value)
        if rng.integers(4) == 0:
            content = mutated_bytes(rng, content)
        hub_only = bool(rng.integers(2))

        def run():
            (tmp_path / "tokenizer_config.json").write_bytes(content)
            model, aside = tmp_path / "tokenizer.model", tmp_path / "aside.model"
            if hub_only:
                model.rename(aside)
            try:
                use(tmp_path, "a <turn_end> b")
            finally:
                if hub_only:
                    aside.rename(model)

        return Case(f"tokenizer_config.json {content[:1500]!r}, hub_only={hub_only}", run)

    return generate


def test_hostile_sentencepiece_models(rng, folder, normalizing, tmp_path):
    run_cases(model_case(folder, normalizing, tmp_path), rng, share(0.04))


def test_hostile_hub_files(rng, folder, tmp_path):
    run_cases(hub_case(folder, tmp_path), rng, share(0.04))


def test_hostile_configurations(rng, folder, tmp_path):
    run_cases(config_case(folder, tmp_path), rng, share(0.04))

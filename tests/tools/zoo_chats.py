"""Small tokenizers and chat templates, built as the ones of model families that people have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.tools.tokenizers import docstrings
from tests.tools.zoo import zoo_config, zoo_model

TEMPLATES = Path(__file__).parent / "zoo_templates"
"""Each writes messages, tools, calls and results as its family's own template does, with fewer cases."""

# Family: kind of tokenizer, added tokens that are special and that aren't, begin and end tokens.
FAMILIES: dict[str, tuple[str, list[str], list[str], str, list[str]]] = {
    "qwen3": ("byte-level nfc",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
        "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3 coder": ("byte-level nfc",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3 thinking": ("byte-level nfc",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
        "", ["<|im_end|>", "<|endoftext|>"]),
    "llama3": ("byte-level",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|eom_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(40))],
        [], "<|begin_of_text|>", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
    "mistral": ("pieces with prefix",
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", *(f"[control_{i}]" for i in range(8, 40))],
        [], "<s>", ["</s>"]),
    "mistral args": ("byte-level",
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        [], "<s>", ["</s>"]),
    "mistral ids": ("byte-level",
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        [], "<s>", ["</s>"]),
    "gemma3": ("pieces",
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["\n\n", "\u2581\u2581", "<table>", "</table>", "<h1>", "<unused0>"],
        "<bos>", ["<end_of_turn>", "<eos>"]),
    "phi3": ("pieces with prefix",
        ["<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"],
        ["</s>"], "<s>", ["<|end|>", "<|endoftext|>"]),
    "phi4 mini": ("byte-level",
        ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>"],
        [], "", ["<|end|>", "<|endoftext|>"]),
    "harmony": ("byte-level",
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
         "<|end|>", "<|message|>", "<|call|>"],
        [], "", ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "lfm2": ("byte-level",
        ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>",
         "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>",
         "<|tool_response_end|>"],
        [], "<|startoftext|>", ["<|im_end|>"]),
    "lfm2 first": ("byte-level",
        ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>",
         "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>",
         "<|tool_response_end|>"],
        [], "<|startoftext|>", ["<|im_end|>"]),
    "gemma4": ("pieces",
        ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
         '<|"|>', "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>"],
        [], "<bos>", ["<turn|>", "<eos>", "<|tool_response>"]),
}  # fmt: skip


@cache
def _trained(kind: str) -> str:
    """The tokenizer file of a small vocabulary of a kind, without added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind.startswith("byte-level"):
        made = Tokenizer(models.BPE(ignore_merges=True))
        words = Regex(
            r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        if "nfc" in kind:
            made.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator([docstrings()[:30_000]], trainer)
        return made.to_str()
    steps = [normalizers.Replace(" ", "\u2581")]
    decode = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if "prefix" in kind:
        steps.insert(0, normalizers.Prepend("\u2581"))
        decode.append(decoders.Strip(" ", 1, 0))
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(decode)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<unk>", *names],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    lines = [line for text in docstrings()[:30_000].splitlines() for line in text.split("  ")]
    made.train_from_iterator(lines, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # bytes are plain pieces
    return json.dumps(content)


def tokenizer_file(family: str) -> dict[str, Any]:
    """The content of `tokenizer.json` of a small tokenizer of a family."""
    kind, special, other, begin, _ = FAMILIES[family]
    content: dict[str, Any] = json.loads(_trained(kind))
    vocabulary = content["model"]["vocab"]
    size = max(vocabulary.values()) + 1
    for name in [*special, *other]:
        token = vocabulary.get(name, size)
        size = max(size, token + 1)
        content["added_tokens"].append(
            {
                "id": token,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": family == "phi3" and name.startswith("<|"),
                "normalized": False,
                "special": name in special,
            }
        )
        if kind.startswith("pieces"):  # SentencePiece's vocabularies hold them, too
            vocabulary[name] = token
    if begin:
        known = {token["content"]: token["id"] for token in content["added_tokens"]}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": begin, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {begin: {"id": begin, "ids": [known[begin]], "tokens": [begin]}},
        }
    return content


def write_tokenizer(folder: Path, family: str) -> int:
    """Write the tokenizer's files of a family; return the size of its vocabulary."""
    *_, begin, ends = FAMILIES[family]
    content = tokenizer_file(family)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
    settings |= {"bos_token": begin} if begin else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = TEMPLATES / f"{family.replace(' ', '_')}.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    ids = [token["id"] for token in content["added_tokens"]]
    return max([*content["model"]["vocab"].values(), *ids]) + 1


def write_family_folder(
    folder: Path, family: str, model_type: str = "qwen3", seed: int = 0, **config: Any
) -> Path:
    """Write a folder with random weights of a type of mlx-lm, and a family's tokenizer and template."""
    size = write_tokenizer(folder, family)
    model = zoo_model(model_type, size, seed)
    known = {token["content"]: token["id"] for token in tokenizer_file(family)["added_tokens"]}
    ends = [known[name] for name in FAMILIES[family][-1]]
    values = {**zoo_config(model_type, size), "eos_token_id": ends, **config}
    (folder / "config.json").write_text(json.dumps(values))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder

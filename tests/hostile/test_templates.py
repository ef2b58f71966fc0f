"""Hostile chats and chat templates: only the template writes control tokens, and every rendering ends."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from tests.hostile.file_mutations import change_inside, pick
from tests.hostile.harness import Case, run_cases
from tests.tools.zoo_chats import write_tokenizer

NAMES = ["<turn_start>", "<turn_end>", "<executable_start>", "<executable_end>"]
WORDS = [
    *NAMES, "<n>", "</s>", "<pad>", "\n", " ", "\ufdd0", "\ufdd1", "<", ">", "＜", "﹤", "<turn_", "end>",
    "\u0001", "turn_end", "x", "日本", "é", "\u2581", "\\", '"', "{{ 1 }}", "{% raw %}", "\U0010ffff",
    "\U000f0000", "\u200b",
]  # fmt: skip
ROLES = ["user", "assistant", "tool", "function"]
WRONG = [None, 5, -1.5, True, [], {}, [[]], [5], {"a": None}, "", "\ud800", 10**5000, float("nan")]
WRONG += [b"x", {5: "x"}, [{"type": "text", "text": 5}]]

# Parts of templates: text, what reads messages, and what takes much.
PARTS = [
    *NAMES, "</s>", "{{ m.role }}", "{{ m.content }}", "{{ m.content | trim }}", "{{ m.content.upper() }}",
    "{{ m.content | replace('x', '') }}", "{{ m.content.split('x') | join }}", "{{ m | tojson }}",
    "{{ m.content | tojson(ensure_ascii=true) }}", "<{{ m.content }}>", "{{ '<' ~ m.content }}",
    "{{ m.content | reverse }}", "{{ m.content[2:] }}", "{{ m }}", "{{ m.tool_calls }}",
    "{{ m.content | title }}",
    "{{ messages | map(attribute='content') | join }}", "{{ tools | tojson(indent=2) }}", "{{ eos_token }}",
    "{% if m.content is string %}a{% endif %}", "{% set y = m.content %}{{ y ~ y }}", "{{ m.response_format }}",
    "{% for c in m.content %}{{ c }}{% endfor %}", "{{ (m.content ~ '') | trim }}", "{{ note }}",
]  # fmt: skip
BOMBS = [
    "{% break %}", "{{ 10 ** 999999999 }}", "{{ 'a' * 10**10 }}", "{{ range(10**9) }}",
    "{{ 1 | center(10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ " + "(" * 999,
    "{{ m.__class__ }}", "{{ raise_exception(m) }}", "{{ '%999999999d' % 1 }}", "{{ " + "9" * 5000 + " }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ strftime_now('%Y') }}", "{% if", "{{ [m] * 10**9 }}",
]  # fmt: skip


@cache
def tokenizer():
    return load_tokenizer(resolve_model(EMBEDDED_MODEL))


@cache
def control_ids():
    return frozenset(tokenizer().convert_tokens_to_ids([*NAMES, "</s>", "<pad>"]))


def controls(ids):
    return [token for token in ids if token in control_ids()]


def text(rng):
    return "".join(pick(rng, WORDS) for _ in range(int(rng.integers(8))))


def chat(rng, write):
    """Messages and tools whose texts `write()` gives; the draws besides are the same whatever it gives."""
    messages = [{"role": "system", "content": write()}] if rng.integers(2) else []
    for _ in range(int(rng.integers(1, 5))):
        message = {"role": pick(rng, ROLES), "content": write()}
        kind = int(rng.integers(6))
        if kind == 0:
            call = {"name": write(), "arguments": {write(): [write(), {write(): 1}]}}
            message["tool_calls"] = [{"function": call}]
        elif kind == 1:
            schema = {"name": write(), "description": write(), "schema": {write(): write()}}
            message["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind == 2:
            message["content"] = [{"type": "text", "text": write()} for _ in range(3)]
        elif kind == 3 and message["role"] in ("tool", "function"):
            message["content"] = {write(): write()}
        messages.append(message)
    tools = [{"name": write(), write(): {"description": write()}}] if rng.integers(2) else None
    return messages, tools


def two_chats(rng):
    """A hostile chat, and one that differs in its texts alone."""
    seed = rng.bit_generator.state
    hostile = chat(rng, lambda: text(rng.spawn(1)[0]))
    rng.bit_generator.state = seed
    return hostile, chat(rng, lambda: "y")


def test_hostile_chats(rng):
    def hostile_chat(rng):
        (messages, tools), (plain, plain_tools) = two_chats(rng)
        prompt = bool(rng.integers(2))

        def run():
            encode = tokenizer().apply_chat_template
            ids = encode(messages, tools, add_generation_prompt=prompt)
            right = encode(plain, plain_tools, add_generation_prompt=prompt)
            assert controls(ids) == controls(right)
            rendered = encode(messages, tools, add_generation_prompt=prompt, tokenize=False)
            assert tokenizer().decode(ids) == rendered.replace("<n>", "\n").replace("\u2581", " ")

        return Case(f"{messages!r} {tools!r}", run)

    run_cases(hostile_chat, rng, 0.04)


def test_templates_of_random_parts(rng):
    def hostile_template(rng):
        (messages, tools), (plain, plain_tools) = two_chats(rng)
        parts = [pick(rng, PARTS) for _ in range(int(rng.integers(1, 7)))]
        if rng.integers(4) == 0:
            parts.insert(int(rng.integers(len(parts) + 1)), pick(rng, BOMBS))
        loop = "".join(["{% for m in messages %}", *parts, "{% endfor %}"])
        source = loop + "{# tool_calls response_format #}"

        def run():
            encode = tokenizer().apply_chat_template
            ids = encode(messages, tools, chat_template=source, note=messages[0]["content"])
            right = encode(plain, plain_tools, chat_template=source, note="y")
            assert controls(ids) == controls(right)

        return Case(f"{source} over {messages!r} {tools!r}", run)

    run_cases(hostile_template, rng, 0.03)


def test_mutated_templates(rng):
    def mutated_template(rng):
        source = V6_TEMPLATE if rng.integers(2) else "{% for m in messages %}" + "".join(PARTS)
        for _ in range(int(rng.integers(1, 6))):
            at, size = int(rng.integers(len(source))), int(rng.integers(1, 40))
            own, others = source[at : at + size], [pick(rng, PARTS), pick(rng, BOMBS)]
            part = pick(rng, [own, text(rng), *others, "%}", "{{", ""]) * int(rng.integers(1, 3))
            source = source[:at] + part + source[at + size * int(rng.integers(2)) :]
        messages, tools = chat(rng, lambda: text(rng))

        def run():
            tokenizer().apply_chat_template(messages, tools, chat_template=source)

        return Case(f"{source} over {messages!r}", run)

    run_cases(mutated_template, rng, 0.02)


def test_messages_of_wrong_types(rng):
    def wrong_messages(rng):
        messages, tools = chat(rng, lambda: text(rng))
        target = {"messages": messages, "tools": tools}
        for _ in range(int(rng.integers(1, 4))):
            change_inside(rng, target, WRONG, deepest=2000)
        tool_list, variables = target.get("tools"), {"note": pick(rng, WRONG)}

        def run():
            ids = tokenizer().apply_chat_template(target.get("messages"), tool_list, **variables)
            assert controls(ids)[:1] == [tokenizer().separator_id]

        try:
            what = json.dumps(target, default=repr)
        except (ValueError, RecursionError):
            what = "deeply nested messages"
        return Case(what, run)

    run_cases(wrong_messages, rng, 0.03)


# -- tokenizers of mlx-lm's models

ZOO_NAMES = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</think>"]


def for_zoo(text):
    """A part of a template or text with Qwen's names in place of AFM's."""
    for own, name in zip(NAMES, ZOO_NAMES, strict=True):
        text = text.replace(own, name)
    return text


@cache
def zoo_tokenizer():
    from mlx_lm.tokenizer_utils import load

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), "qwen3")
        return ZooTokenizer.of(load(Path(folder)))


def zoo_controls(ids):
    return [token for token in ids if token in set(zoo_tokenizer().control_names.values())]


def test_zoo_templates_of_random_parts(rng):
    def hostile_template(rng):
        (messages, tools), (plain, plain_tools) = two_chats(rng)
        messages, tools = json.loads(for_zoo(json.dumps([messages, tools])))
        parts = [for_zoo(pick(rng, PARTS)) for _ in range(int(rng.integers(1, 7)))]
        if rng.integers(4) == 0:
            parts.insert(int(rng.integers(len(parts) + 1)), pick(rng, BOMBS))
        loop = "".join(["{% for m in messages %}", *parts, "{% endfor %}"])
        source = loop + "{# tools tool_calls response_format #}"

        def run():
            encode = zoo_tokenizer().apply_chat_template
            ids = encode(messages, tools, chat_template=source, note=messages[0]["content"])
            right = encode(plain, plain_tools, chat_template=source, note="y")
            assert zoo_controls(ids) == zoo_controls(right)

        return Case(f"{source} over {messages!r} {tools!r}", run)

    run_cases(hostile_template, rng, 0.03)


def test_zoo_tokenizers_take_wrong_chats_as_one_error(rng):
    def wrong_chat(rng):
        messages, tools = chat(rng, lambda: text(rng))
        change_inside(rng, messages, WRONG, deepest=2000)

        def run():
            zoo_tokenizer().apply_chat_template(messages, tools)

        return Case("a wrong chat", run)

    run_cases(wrong_chat, rng, 0.03)

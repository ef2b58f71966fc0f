"""Hostile chats and chat templates: control tokens are the template's alone, and nothing takes for ever."""

import json
from functools import cache

from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.hostile.file_mutations import pick, place_in
from tests.hostile.harness import Case, run_cases, share

NAMES = ["<turn_start>", "<turn_end>", "<executable_start>", "<executable_end>"]
WORDS = [
    *NAMES, "<n>", "</s>", "<pad>", "\n", " ", "\ufdd0", "\ufdd1", "<", ">", "＜", "﹤", "<turn_", "end>",
    "\u0001", "turn_end", "x", "日本", "é", "\u2581", "\\", '"', "{{ 1 }}", "{% raw %}", "\U0010ffff",
    "\U000f0000", "\u200b",
]  # fmt: skip
ROLES = ["user", "assistant", "tool", "function"]
WRONG = [
    None,
    5,
    -1.5,
    True,
    [],
    {},
    [[]],
    [5],
    {"a": None},
    "",
    "\ud800",
    10**5000,
    float("nan"),
    b"x",
]

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


def hostile_chat(rng):
    (messages, tools), (plain, plain_tools) = two_chats(rng)
    prompt = bool(rng.integers(2))

    def run():
        encode = tokenizer().apply_chat_template
        ids = encode(messages, tools, add_generation_prompt=prompt)
        assert controls(ids) == controls(encode(plain, plain_tools, add_generation_prompt=prompt))
        rendered = encode(messages, tools, add_generation_prompt=prompt, tokenize=False)
        assert tokenizer().decode(ids) == rendered.replace("<n>", "\n").replace("\u2581", " ")

    return Case(f"{messages!r} {tools!r}", run)


def hostile_template(rng):
    """A template of random parts, over a hostile chat; a quarter have a bomb."""
    (messages, tools), (plain, plain_tools) = two_chats(rng)
    parts = [pick(rng, PARTS) for _ in range(int(rng.integers(1, 7)))]
    if rng.integers(4) == 0:
        parts.insert(int(rng.integers(len(parts) + 1)), pick(rng, BOMBS))
    source = (
        "{% for m in messages %}" + "".join(parts) + "{% endfor %}{# tool_calls response_format #}"
    )

    def run():
        encode = tokenizer().apply_chat_template
        ids = encode(messages, tools, chat_template=source, note=messages[0]["content"])
        expected = encode(plain, plain_tools, chat_template=source, note="y")
        assert controls(ids) == controls(expected)

    return Case(f"{source} over {messages!r} {tools!r}", run)


def mutated_template(rng):
    """AFM's own, or one of parts, with characters dropped, doubled, swapped or put in."""
    source = V6_TEMPLATE if rng.integers(2) else "{% for m in messages %}" + "".join(PARTS)
    for _ in range(int(rng.integers(1, 6))):
        at, size = int(rng.integers(len(source))), int(rng.integers(1, 40))
        part = pick(
            rng,
            [source[at : at + size], text(rng), pick(rng, PARTS), pick(rng, BOMBS), "%}", "{{", ""],
        )
        source = (
            source[:at]
            + part * int(rng.integers(1, 3))
            + source[at + size * int(rng.integers(2)) :]
        )
    messages, tools = chat(rng, lambda: text(rng))
    return Case(
        f"{source} over {messages!r}",
        lambda: tokenizer().apply_chat_template(messages, tools, chat_template=source),
    )


def wrong_messages(rng):
    """Messages with values of wrong types anywhere, or nested deeply."""
    messages, tools = chat(rng, lambda: text(rng))
    target = {"messages": messages, "tools": tools}
    for _ in range(int(rng.integers(1, 4))):
        spoil(rng, target)
    tool_list, variables = target.get("tools"), {"note": pick(rng, WRONG)}

    def run():
        ids = tokenizer().apply_chat_template(target.get("messages"), tool_list, **variables)
        assert controls(ids)[:1] == [tokenizer().separator_id]

    return Case(repr_of(target), run)


def spoil(rng, value):
    """Put something of a wrong type somewhere inside."""
    if (place := place_in(rng, value, deeper=4)) is None:
        return
    value, key = place
    deep = []
    for _ in range(int(rng.integers(2000))):
        deep = [deep]
    value[key] = pick(rng, [*WRONG, deep, {"a": deep}, {5: "x"}, [{"type": "text", "text": 5}]])


def repr_of(value):
    try:
        return json.dumps(value, default=repr)[:2000]
    except (ValueError, RecursionError):
        return "deeply nested messages"


def test_hostile_chats(rng):
    run_cases(hostile_chat, rng, share(0.04))


def test_hostile_templates(rng):
    run_cases(hostile_template, rng, share(0.03))


def test_mutated_templates(rng):
    run_cases(mutated_template, rng, share(0.02))


def test_messages_of_wrong_types(rng):
    run_cases(wrong_messages, rng, share(0.03))

"""Chats as records of training data, and what is read of them."""

import numpy as np

from afm_mlx.training.data.samples import load_split
from tests.tools.cli import lines as write
from tests.tools.tokenizers import plain_text

USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "The fox."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "id": "7",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": [1, "x"]}'},
}
TOOL = {"type": "function", "function": {"name": "look", "description": "é <b>", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "A", "schema": {"type": "object"}}}


CHATML = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}<|im_start|>user\nresult: {{ m.content }}"
    "{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{%- endif -%}"
    "{%- for c in m.tool_calls or [] -%}<call>{{ c.function | tojson }}{%- endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if tools -%}{%- endif -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
# As reasoning models have it: only the last answer keeps a thought, and the prompt starts one.
THINKING = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)
# A turn's newline and the one behind it are one token.
NEWLINES = (
    "{%- for m in messages -%}{{ '\n\n' if not loop.first }}{{ m.role }}: {{ m.content }}{{ '\n' }}"
    "{%- endfor -%}{{ '\n\nassistant:' if add_generation_prompt }}"
)


def load_one(tmp_path, tokenizer, record, max_seq_length=2000, **options):
    file = write(tmp_path / "one.jsonl", record)
    (sample,) = load_split(file, "train", tokenizer, max_seq_length=max_seq_length, **options)
    assert sample.where == f"{file}:1"
    return sample


def targets(sample, tokenizer):
    """The text that has full weight."""
    return tokenizer.decode(np.asarray(sample.tokens)[np.asarray(sample.weights) == 1].tolist())


def random_chat(rng):
    """A chat that the toolkit takes: tools, tool results and response formats among its turns."""
    messages = [{"role": "system", "content": "s" + plain_text(rng)}] if rng.integers(2) else []
    for _ in range(rng.integers(1, 4)):
        user = {"role": "user", "content": "q" + plain_text(rng)}
        messages.append(user | ({"response_format": SCHEMA} if rng.integers(4) == 0 else {}))
        for _ in range(rng.integers(3)):
            content = plain_text(rng) if rng.integers(2) else ""
            count = int(rng.integers(1, 3))
            messages.append({"role": "assistant", "content": content, "tool_calls": [CALL] * count})
            results = [{"ok": 1.5, "ä": plain_text(rng)}, plain_text(rng), [TOOL]]
            for index in rng.integers(3, size=count):
                role = str(rng.choice(["tool", "function"]))
                messages.append({"role": role, "content": results[index]})
        messages.append({"role": "assistant", "content": "a" + plain_text(rng)})
    return messages

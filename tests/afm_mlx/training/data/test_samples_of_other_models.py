"""Training data for models of mlx-lm's zoo: targets found by rendering a chat template again and again."""

import pytest

from afm_mlx.errors import DataError
from tests.tools.chats import ANSWER, SCHEMA, SYSTEM, TOOL, USER, load_one, random_chat, targets
from tests.tools.tokenizers import docstrings

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
# The system message goes into the last user's turn, wherever that is.
MOVING = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}[{{ 'LAST ' if loop.index >= loop.length - 1 }}"
    "{{ m.content }}]{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
)
# Past answers lose their end, so that nothing says where they stop.
ENDLESS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- if loop.last and m.role == 'assistant' -%}!{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


# A turn's newline and the one behind it are one token.
LINES = (
    "{%- for m in messages -%}{{ '\n\n' if not loop.first }}{{ m.role }}: {{ m.content }}{{ '\n' }}"
    "{%- endfor -%}{{ '\n\nassistant:' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def zoo_tokenizer():
    """A function (chat template) -> a tokenizer as mlx-lm loads them: byte-level BPE."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([docstrings()[:20_000], "a\n\n\n\n" * 500], trainer)

    def make(template):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
        tokenizer.chat_template = template
        return TokenizerWrapper(tokenizer)

    return make


CONVERSATION = [SYSTEM, USER, ANSWER, {"role": "user", "content": "And\n?"},
                {"role": "assistant", "content": "A dog,\n\n  a <n> cat."}]  # fmt: skip


def test_assistant_turns_of_a_zoo_template(zoo_tokenizer, tmp_path, rng):
    tokenizer = zoo_tokenizer(CHATML)
    for _ in range(20):
        messages = random_chat(rng)
        for message in messages:
            message.pop("response_format", None)
            if isinstance(message["content"], list):
                message["content"] = "text"
        record = {"messages": messages, "tools": [TOOL]}
        sample = load_one(tmp_path, tokenizer, record, max_seq_length=10**5)
        call = '<call>{"name": "look", "arguments": {"at": [1, "x"]}}'
        answers = [
            message["content"] + call * len(message.get("tool_calls", ())) + "<|im_end|>"
            for message in messages
            if message["role"] == "assistant"
        ]
        # A newline after the head may be in one token with newlines of the answer.
        said = targets(sample, tokenizer).split("<|im_end|>")
        for text, answer in zip(said, "".join(answers).split("<|im_end|>"), strict=True):
            assert text in (answer, "\n" + answer)


def test_an_answers_first_newlines_are_targets(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(CHATML)
    answer = {"role": "assistant", "content": "\n\n\nfox"}
    sample = load_one(tmp_path, tokenizer, [USER, answer])
    assert targets(sample, tokenizer) == "\n\n\n\nfox<|im_end|>"


def test_a_token_of_two_turns_is_no_target(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(LINES)
    sample = load_one(tmp_path, tokenizer, CONVERSATION)
    assert targets(sample, tokenizer) == " The fox. A dog,\n\n  a <n> cat.\n"


def test_thoughts_that_a_template_takes_out_of_past_answers(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(THINKING)
    sample = load_one(tmp_path, tokenizer, CONVERSATION)
    said = targets(sample, tokenizer)
    assert said == "The fox.<|im_end|>\n</think>\n\nA dog,\n\n  a <n> cat.<|im_end|>"


def test_templates_that_hide_turns_are_named(zoo_tokenizer, tmp_path):
    for template, record, message in [
        (MOVING, CONVERSATION[1:], r"messages\[1\]: .*renders the messages before it differently"),
        (ENDLESS, CONVERSATION, r"messages\[2\]: .*ends it with no stop token"),
        ("{{ raise_exception('no roles') }}", [USER, ANSWER], "can't take this chat .*no roles"),
        ("x", [USER, ANSWER], "renders nothing for this turn"),
        ("{{ messages }}", {"messages": [USER, ANSWER], "tools": [TOOL]}, "has tools, which"),
        (
            "x",
            [{**USER, "response_format": SCHEMA}, ANSWER],
            "has response_format, which the model's",
        ),
        (None, [USER, ANSWER], "no chat template"),
    ]:
        with pytest.raises(DataError, match=rf"one\.jsonl:1: .*{message}"):
            load_one(tmp_path, zoo_tokenizer(template), record)


def test_texts_of_the_zoo_end_with_the_stop_token(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(None)
    sample = load_one(tmp_path, tokenizer, {"text": "A fox"})
    assert sample.tokens.tolist() == [*tokenizer.encode("A fox"), tokenizer.eos_token_id]
    with pytest.raises(DataError, match=r"one\.jsonl:1: .*can't take this text"):
        load_one(tmp_path, tokenizer, {"text": "half \ud800"})

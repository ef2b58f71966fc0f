"""mlx-lm's own functions take the tokenizer in place of theirs."""

import mlx.core as mx
import pytest

from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.detokenizer import StreamingDetokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

mlx_lm = pytest.importorskip("mlx_lm")
CHAT = [{"role": "user", "content": "Hi"}]


def test_attributes(tokenizer):
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (None, None)
    assert (tokenizer.has_chat_template, tokenizer.has_thinking) == (True, False)
    assert tokenizer.tool_call_start == "<executable_start>"
    assert (tokenizer.tool_call_start_tokens, tokenizer.tool_call_end_tokens) == ((5,), (6,))
    assert tokenizer.tool_parser is parse_tool_calls
    assert isinstance(tokenizer, AFMTokenizer)


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


def test_mlx_lm_streams_with_it(tokenizer):
    """Newlines and indentation survive, and the answer ends at the end of the turn."""
    answer = "def f():\n    x = 'é😀'\n     \n  return x <n> < n\n"
    ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    count = len(tokenizer.encode(prompt, add_special_tokens=True))
    model = ScriptedModel(count, ids, len(tokenizer))
    responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=len(ids) + 5))
    assert "".join(r.text for r in responses) == answer.replace("<n>", "\n")
    assert responses[-1].finish_reason == "stop"
    assert responses[-1].prompt_tokens == count


def test_mlx_lms_wrapper_around_it(tokenizer):
    """With the detokenizer that it makes, or with ours."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    for wrapper in (TokenizerWrapper(tokenizer), TokenizerWrapper(tokenizer, StreamingDetokenizer)):
        assert wrapper.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT)
        assert wrapper.eos_token_ids >= {4}
        detokenizer = wrapper.detokenizer
        for token in tokenizer.encode("one two\nthree"):
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == "one two\nthree"

"""Thoughts before answers: constraints that hold behind them."""

import pytest
from mlx_lm.tokenizer_utils import load

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, shortest_completion
from afm_mlx.guidance.thoughts import after_thoughts, thought_form
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from tests.tools.constraints import closed
from tests.tools.zoo_chats import write_tokenizer

MARKS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3 thinking": ("", "\n</think>\n\n"),  # the prompt begins the thought
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}


@pytest.mark.parametrize("family", MARKS)
def test_an_answer_is_completed_wherever_it_is_cut_off(tmp_path, family):
    """Before, within and behind a thought, its marks, and its characters."""
    write_tokenizer(tmp_path, family)
    tokenizer = ZooTokenizer.of(load(tmp_path))
    form, (begin, end) = thought_form(tokenizer), MARKS[family]
    answer = Constraint.json_schema(closed({"a": {"const": "é"}}))
    constraint = after_thoughts(answer, form, is_begun=not begin)
    ids = tokenizer.encode(f'{begin}Hm é 日本.{end}{{"a": "é"}}', add_special_tokens=False)
    for cut in range(len(ids) + 1):
        matcher = Matcher(constraint, tokenizer)
        for token in ids[:cut]:
            matcher.accept(token)
        completion = shortest_completion(matcher)
        assert not matcher.is_complete or not completion
        text = tokenizer.decode([*ids[:cut], *completion])
        for token in completion:
            matcher.accept(token)
        assert matcher.is_complete, text
        assert text.endswith('{"a": "é"}'), text
        assert form.end_name not in text or text.count(form.end_name) == 1

"""Forced text: the tokens that llguidance itself finds, but never more than a bounded piece at a time."""

import json

import numpy as np
from llguidance import LLMatcher

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.deep_stack import LIMITS
from afm_mlx.guidance.matcher import MAX_FORCED_BYTES, Matcher, fill_masks, without_forcing
from afm_mlx.guidance.token_bytes import ll_tokenizer
from afm_mlx.guidance.tool_calls import tool_call_constraint
from tests.tools.cases import each
from tests.tools.constraints import nano_tokenizer

_OBJECT = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "who": {"enum": ["Ann", "Andrew", "Zoë"]},
        "日本": {"type": "null"},
    },
    "required": ["title", "who", "日本"],
    "additionalProperties": False,
}
_TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": _OBJECT}}]
CONSTRAINTS = [
    lambda: Constraint.json_schema(_OBJECT),
    lambda: Constraint.regex(r"Order [A-Z]\d{3} is (done|dropped)\."),
    lambda: Constraint.regex("a{200}b"),
    lambda: Constraint.choices(["émile", "ème", "été 1", "😀", "😁"]),
    lambda: Constraint.choices(["money", "money is here and there, and everywhere else, too"]),
    lambda: tool_call_constraint(_TOOLS, "required"),
    lambda: tool_call_constraint(_TOOLS, "auto"),
    lambda: Constraint.regex("[0-9]+, then more").behind("At 1"),
]


@each("make", CONSTRAINTS)
def test_forced_tokens_are_those_of_llguidance(rng, make):
    tokenizer, constraint = nano_tokenizer(), make()
    for _ in range(4):
        ours = Matcher(constraint, tokenizer)
        theirs = LLMatcher(ll_tokenizer(tokenizer), constraint.grammar, log_level=0, limits=LIMITS)
        for _ in range(40):
            forced = ours.forced()
            assert forced == theirs.compute_ff_tokens()
            for token in forced:
                ours.accept(token)
            assert theirs.consume_tokens(forced)
            if ours.is_stopped:
                break
            token = draw(rng, ours)
            ours.accept(token)
            assert theirs.consume_token(token)
            if token in tokenizer.eos_token_ids:
                break


@each("make", [lambda: Constraint.regex("a{5000}"), lambda: Constraint.lark('start: "a" start')])
def test_forced_text_comes_in_bounded_pieces(rng, make):
    matcher = Matcher(make(), nano_tokenizer())
    length = 0
    while length < 5000:
        tokens = matcher.forced()
        piece = len(matcher.tokenizer.decode_bytes(tokens))
        assert min(MAX_FORCED_BYTES - 20, 5000 - length) <= piece <= MAX_FORCED_BYTES
        for token in tokens:
            matcher.accept(token)
        length += piece
        if length < 5000:
            token = draw(rng, matcher)
            matcher.accept(token)
            length += len(matcher.tokenizer.decode_bytes([token]))


@each("grammar", ['start: "a"', json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})])
def test_the_search_of_llguidance_is_off(grammar):
    tokenizer = ll_tokenizer(nano_tokenizer())
    assert LLMatcher(tokenizer, grammar).compute_ff_tokens()
    assert not LLMatcher(tokenizer, without_forcing(grammar)).compute_ff_tokens()


def draw(rng, matcher):
    """A random token of those that are allowed."""
    bits = np.unpackbits(fill_masks([matcher])[0].view(np.uint8), bitorder="little")
    return int(rng.choice(np.flatnonzero(bits)))

"""A model and a tokenizer for constrained answers, and the naive loop that they are compared with."""

import functools
import math
from importlib.resources import files

import mlx.core as mx
import numpy as np
import regex
from llguidance import LLMatcher

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, fill_masks
from afm_mlx.guidance.token_bytes import ll_tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.adapters import SIZES
from tests.tools.models import random_config, random_model


def closed(properties, optional=()):
    """A schema of objects with these properties and no others."""
    required = [name for name in properties if name not in optional]
    kind = {"type": "object", "properties": properties, "required": required}
    return {**kind, "additionalProperties": False}


EVENT = closed(
    {
        "title": {"type": "string", "maxLength": 12},
        "guests": {"type": "integer", "minimum": 1, "maximum": 99},
        "days": {"type": "array", "items": {"enum": ["Mon", "Tue", "Wed"]}, "maxItems": 3},
    }
)
# The second one forces more tokens than a row in a batch is fed one by one.
CONSTRAINTS = {
    "schema": lambda: Constraint.json_schema(EVENT),
    "forced": lambda: Constraint.regex(
        r"[a-z]: this is a rather long text that every answer has to hold, [a-z]{1,3}"
    ),
    "regex": lambda: Constraint.regex(r"[a-f]{2,9}(-[0-9]+){0,2}"),
    "choices": lambda: Constraint.choices(["New York", "New Orleans", "Newark", "日本"]),
    "lark": lambda: Constraint.lark('start: item ("," item){0,3}\nitem: /[a-c]+/ | "<" start ">"'),
}


@functools.cache
def nano_tokenizer():
    return load_tokenizer(files("afm_mlx") / "embedded/afm-nano")


def random_token(rng, matcher):
    """A random token of those that a matcher allows."""
    bits = np.unpackbits(fill_masks([matcher])[0].view(np.uint8), bitorder="little")
    return int(rng.choice(np.flatnonzero(bits)))


def random_answer(rng, constraint, most=300):
    """A text of random allowed tokens; None if it has no end after `most` draws."""
    matcher, tokenizer = Matcher(constraint, nano_tokenizer()), nano_tokenizer()
    tokens = []
    for _ in range(most):
        tokens += (forced := matcher.forced())
        for token in forced:
            matcher.accept(token)
        if matcher.is_stopped:
            break
        matcher.accept(token := random_token(rng, matcher))
        tokens += [token] if token not in tokenizer.eos_token_ids else []
    text = b"".join(bytes_of(tokenizer, token) for token in tokens)
    return text.decode() if matcher.is_stopped else None


def wide_model(rng, extra=5, **fields):
    """A random model whose embedding has more rows than the tokenizer has tokens."""
    sizes = SIZES | {"vocab_size": len(nano_tokenizer()) + extra, "kv_bits": None}
    return random_model(random_config(rng, **sizes, **fields), rng)


def naive_constrained(model, tokenizer, request, count=400):
    """The greedy tokens of a request, from full logits and llguidance's own masks, without any cache."""
    matcher = LLMatcher(ll_tokenizer(tokenizer), request.constraint.grammar)
    tokens: list[int] = []

    def take(token):
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
        return token in tokenizer.eos_token_ids or len(tokens) == request.max_tokens

    def forced():
        return matcher.compute_ff_tokens() if not matcher.is_stopped() else []

    while len(tokens) < count:
        for token in forced():
            if take(token):
                return tokens
        if matcher.is_stopped():
            return tokens
        logits = mx.array(model(mx.array([[*request.prompt, *tokens]]))[0, -1], mx.float32)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.zeros(logits.shape, np.bool_)
        count = ll_tokenizer(tokenizer).vocab_size
        allowed[:count] = bits[:count]
        if take(int(mx.argmax(mx.where(mx.array(allowed), logits, -math.inf)).item())):
            return tokens
    return tokens


def naive_by_regex(model, tokenizer, prompt, pattern, count):
    """Greedy tokens under a pattern for ASCII, by another matcher: what may follow is a partial match."""
    texts = [
        bytes_of(tokenizer, token).decode("ascii", "replace") for token in range(len(tokenizer))
    ]
    tokens, so_far = [], ""
    while len(tokens) < count:
        logits = np.array(model(mx.array([[*prompt, *tokens]]))[0, -1], np.float32)
        allowed = np.zeros(len(logits), np.bool_)
        for token, text in enumerate(texts):
            allowed[token] = bool(text) and bool(
                regex.fullmatch(pattern, so_far + text, partial=True)
            )
        if regex.fullmatch(pattern, so_far):
            allowed[sorted(tokenizer.eos_token_ids)] = True
        tokens.append(int(np.argmax(np.where(allowed, logits, -np.inf))))
        if tokens[-1] in tokenizer.eos_token_ids:
            break
        so_far += texts[tokens[-1]]
    return tokens


def bytes_of(tokenizer, token):
    """The bytes of a token as text has them; none for control tokens."""
    if token in tokenizer.control_ids or token in tokenizer.all_special_ids:
        return b""
    name = tokenizer.convert_ids_to_tokens(token)
    if regex.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").replace("<n>", "\n").encode()

"""The state of one row under a constraint: the tokens that are allowed next, and those that are forced."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint, named_grammars
from afm_mlx.guidance.deep_stack import with_deep_stack
from afm_mlx.guidance.forced import forced_tokens, without_forcing
from afm_mlx.guidance.schema.regular import LIMITS
from afm_mlx.guidance.unique_items import UTF8_BYTES, OpenList, State, has_marks
from afm_mlx.guidance.vocabulary import byte_tokens, ll_tokenizer, token_texts

_COMPILED = 64  # grammars
_PATTERN = re.compile(
    r'^T[0-9]+: ("\\"".* & .*)$', re.MULTILINE
)  # terminals of strings, as `rules` writes them
_CHECKED = 16  # patterns of a grammar
_CHECKED_TOKENS = 12  # of each
_SIDE_BY_SIDE = 16  # rows; with fewer, llguidance's threads cost more than they save


class Matcher:
    """The state of one row under a constraint.

    Args:
        constraint: what the row's answer must look like.
        tokenizer: the model's.

    Attributes:
        what: the kind of constraint, for messages.
        tokenizer: llguidance's; a model may have more logits than it has tokens.

    Raises:
        ConstraintError: when the grammar can't be compiled within llguidance's limits, or no text meets it.
    """

    def __init__(self, constraint: Constraint, tokenizer: Any) -> None:
        self.what = constraint.what
        self.tokenizer: LLTokenizer = ll_tokenizer(tokenizer)
        self._matcher = _compiled(constraint, self.tokenizer).deep_copy()
        self._last: int | None = None
        self._lists: tuple[OpenList, ...] | None = () if has_marks(constraint.grammar) else None
        if self._lists is not None and not byte_tokens(self.tokenizer).keys() >= UTF8_BYTES:
            raise ConstraintError(
                f"The {self.what} asks for items that differ (uniqueItems), which needs a tokenizer with a "
                "token for each byte. Leave it out, and check the answer."
            )

    @property
    def is_complete(self) -> bool:
        """True if the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """True if the answer is complete and nothing can follow."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Take the next token of the answer.

        Raises:
            ConstraintError: when it is not allowed, or the grammar has become too complex to follow.
        """
        if self._lists is not None:
            self._follow(token)
        if not self._matcher.consume_token(token):
            self._raise()
        self._last = token

    def forced(self) -> list[int]:
        """The tokens that the grammar forces next, still to be accepted; often none.

        When they are many, more may be forced behind them (`forced.MAX_BYTES`).

        Raises:
            ConstraintError: when the grammar has become too complex to follow.
        """
        if self._matcher.is_stopped():
            return []
        tokens = forced_tokens(self._matcher, self.tokenizer, self._last)
        if self._matcher.is_error():
            self._raise()
        return tokens

    def _follow(self, token: int) -> None:
        """Take a token into the lists whose items must differ."""
        text = token_texts(self.tokenizer)[token]
        if not self._lists and b"[" not in text:
            return
        try:
            state = State(self._matcher.deep_copy(), self.tokenizer, self._lists or ())
            self._lists = state.then(text).lists
        except ValueError as error:
            raise ConstraintError(
                f"The {self.what} can't be followed any further: {error}"
            ) from None

    def restrict(self, mask: np.ndarray) -> None:
        """Take from the tokens that the grammar allows those that would make items of a list equal."""
        if self._lists is not None:
            State(self._matcher, self.tokenizer, self._lists).restrict(mask)

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _raise(self) -> None:
        reason = self._matcher.get_error() or self._matcher.stop_reason()
        raise ConstraintError(f"The {self.what} can't be followed any further: {reason}")


def fill_masks(matchers: Sequence[Matcher]) -> np.ndarray:
    """The tokens that each row may have next. A matcher's error shows in its next `accept`.

    Args:
        matchers: states of N rows, of one tokenizer.

    Returns:
        (N, ceil(vocab_size / 32)) uint32; bit t % 32 of word t // 32 is set where token t is allowed.
    """
    inner = [matcher._matcher for matcher in matchers]
    words = -(-matchers[0].tokenizer.vocab_size // 32)
    masks = np.zeros((len(inner), words), np.uint32)
    if len(inner) < _SIDE_BY_SIDE:
        for one, mask in zip(inner, masks, strict=True):
            one.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    else:
        rows = [(one, i) for i, one in enumerate(inner)]
        _executor().unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, len(inner))
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.restrict(mask)
    return masks


_grammars: OrderedDict[tuple[int, str], tuple[LLTokenizer, LLMatcher]] = OrderedDict()
_executors: list[LLExecutor] = []


def _compiled(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of a grammar; the last `_COMPILED` are kept."""
    key = (id(tokenizer), constraint.grammar)
    kept = _grammars.pop(key, None)
    if kept is None or kept[0] is not tokenizer:
        grammar = without_forcing(constraint.grammar)
        matcher = with_deep_stack(LLMatcher, tokenizer, grammar, log_level=0, limits=LIMITS)
        probe = matcher.deep_copy()  # some errors show at the first token only
        probe.compute_bitmask()
        if probe.is_error():
            reason = probe.get_error() or probe.stop_reason()
            if "NoExtensionBias" in reason:  # llguidance's name for it
                reason = "no text follows it. Does one of its rules need itself without an end?"
            raise ConstraintError(f"The {constraint.what} can't be honoured: {reason}")
        _check_patterns(constraint, tokenizer)
        kept = tokenizer, matcher
    _grammars[key] = kept
    while len(_grammars) > _COMPILED:
        _grammars.popitem(last=False)
    return kept[1]


def _check_patterns(constraint: Constraint, tokenizer: LLTokenizer) -> None:
    """Follow a random text of each pattern with conditions: only then may llguidance find too many states.

    Raises:
        ConstraintError: when it does.
    """
    rng = np.random.default_rng(0)
    parts = (part.get("lark_grammar", "") for part in named_grammars(constraint.grammar, ""))
    patterns = [found for part in parts for found in _PATTERN.findall(part)]
    for pattern in list(dict.fromkeys(patterns))[:_CHECKED]:
        grammar = f"start: X\nX: {pattern}"
        matcher = with_deep_stack(LLMatcher, tokenizer, grammar, log_level=0, limits=LIMITS)
        for _ in range(_CHECKED_TOKENS):
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            allowed = np.flatnonzero(bits)
            if matcher.is_error():
                reason = matcher.get_error().partition("\n")[0]
                raise ConstraintError(
                    f"The {constraint.what} can't be honoured: one of its patterns has more states than are "
                    f"followed ({reason}). Use one with fewer conditions, or repeat less."
                )
            if matcher.is_stopped() or not len(allowed):
                break
            matcher.consume_token(int(rng.choice(allowed)))


def _executor() -> LLExecutor:
    if not _executors:
        _executors.append(LLExecutor())
    return _executors[0]

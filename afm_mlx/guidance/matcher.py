"""The state of one row under a constraint: allowed tokens, forced tokens, and the shortest completion.

llguidance finds forced text, too, but continues until there is a choice: `a{1000}{1000}{1000}` takes seconds,
and a long word repeated a million times takes gigabytes, while all other rows wait. So its search is switched
off (`without_forcing`), and forced text is read off the masks, `MAX_FORCED_BYTES` at a time: while all allowed
tokens begin with the shortest of them, that one is certain. The text is then encoded as a whole, because its
tokens are mostly single bytes. Tokens at its end that a longer one could replace are left to the model.

The shortest completion of an unfinished answer is found by a search from byte to byte. Texts of one length
that allow the same next bytes, and have the same number of forced bytes, count as one. Texts with more forced
bytes come first, because they are further on. Of the next bytes, the first few in the order of `_PREFERRED`
are tried. If too much is open for that, one string or bracket after the other is closed; such a text need not
be the shortest.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint, named_grammars
from afm_mlx.guidance.deep_stack import LIMITS, with_deep_stack
from afm_mlx.guidance.token_bytes import byte_tokens, ll_tokenizer, token_texts
from afm_mlx.guidance.unique_items import UTF8_BYTES, OpenList, State, has_marks
from afm_mlx.tokenizer.protocol import Tokenizer

# Terminals of strings, as `schema.rules` writes them.
_PATTERN = re.compile(r'^T[0-9]+: ("\\"".* & .*)$', re.MULTILINE)
_CHECKED = 16  # patterns of a grammar
_CHECKED_TOKENS = 12  # of each
_SIDE_BY_SIDE = 16  # rows; with fewer, llguidance's threads cost more than they save


class Matcher:
    """The state of one row under a constraint.

    Args:
        constraint: the row's constraint.
        tokenizer: the model's tokenizer.

    Attributes:
        what, thought_end: see `Constraint`.
        tokenizer: llguidance's tokenizer; a model may have more logits than it has tokens.

    Raises:
        ConstraintError: if the grammar can't be compiled within llguidance's limits, or matches no text.
    """

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        self.what, self.thought_end = constraint.what, constraint.thought_end
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
        """Advance by the next token of the answer.

        Raises:
            ConstraintError: if the token is not allowed, or the grammar has become too complex to follow.
        """
        text = b"" if self._lists is None else token_texts(self.tokenizer)[token]
        if self._lists is not None and (self._lists or b"[" in text):
            try:
                state = State(self._matcher.deep_copy(), self.tokenizer, self._lists)
                self._lists = state.then(text).lists
            except ValueError as error:
                raise ConstraintError(
                    f"The {self.what} can't be followed any further: {error}"
                ) from None
        if not self._matcher.consume_token(token):
            self._raise()
        self._last = token

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, without accepting them; often none.

        Their text has about `MAX_FORCED_BYTES` bytes or fewer; more forced tokens may follow them.

        Raises:
            ConstraintError: if the grammar has become too complex to follow.
        """
        matcher, texts, last = self._matcher, token_texts(self.tokenizer), self._last
        if matcher.is_stopped():
            return []
        mask = np.zeros(-(-len(texts) // 32), np.uint32)
        address, size = mask.ctypes.data, mask.nbytes
        steps: list[_Step] = []
        length = 0
        while length < MAX_FORCED_BYTES and not (matcher.is_stopped() or matcher.is_accepting()):
            matcher.unsafe_compute_mask_ptr(address, size)
            step = None if matcher.is_error() else _certain_step(mask, texts)
            if step is None or not matcher.consume_token(step.token):
                break
            steps.append(step)
            length += max(1, len(step.text))
        if steps:
            matcher.rollback(len(steps))
        if matcher.is_error():
            self._raise()
        tokens: list[int] = []
        run: list[_Step] = []
        for step in steps:
            if step.text:
                run.append(step)
                continue
            tokens += [*_encoded(run, self.tokenizer, texts, last), step.token]
            run, last = [], step.token
        return tokens + _encoded(run, self.tokenizer, texts, last)

    def restrict(self, mask: np.ndarray) -> None:
        """Clear the bits, in a row of `fill_masks`, of tokens that would make items of a unique list equal."""
        if self._lists is not None:
            State(self._matcher, self.tokenizer, self._lists).restrict(mask)

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _raise(self) -> None:
        reason = self._matcher.get_error() or self._matcher.stop_reason()
        raise ConstraintError(f"The {self.what} can't be followed any further: {reason}")


def fill_masks(matchers: Sequence[Matcher]) -> np.ndarray:
    """Return the mask of allowed next tokens of each row. A matcher's error is raised by its next `accept`.

    Args:
        matchers: states of N rows, with one tokenizer.

    Returns:
        (N, ceil(vocab_size / 32)) uint32; bit t % 32 of word t // 32 is set if token t is allowed.
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


_executor = cache(LLExecutor)


@lru_cache(maxsize=64)
def _compiled(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar to a matcher at its start, which callers copy; raise `ConstraintError` if it can't."""
    grammar = without_forcing(constraint.grammar)
    matcher = with_deep_stack(LLMatcher, tokenizer, grammar, log_level=0, limits=LIMITS)
    probe = matcher.deep_copy()  # some errors occur at the first token only
    probe.compute_bitmask()
    if probe.is_error():
        reason = probe.get_error() or probe.stop_reason()
        if "NoExtensionBias" in reason:  # llguidance's name for it
            reason = "no text follows it. Does one of its rules need itself without an end?"
        raise ConstraintError(f"The {constraint.what} can't be honoured: {reason}")
    _check_patterns(constraint, tokenizer)
    return matcher


def _check_patterns(constraint: Constraint, tokenizer: LLTokenizer) -> None:
    """Follow a random text of each pattern with conditions; refuse one with too many states."""
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


# -- forced tokens

MAX_FORCED_BYTES = 256  # most bytes of forced text that are found at once, each with a mask
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class _Step:
    """A token that must come next; `reach` is the byte length of the longest token allowed in its place."""

    token: int
    text: bytes
    reach: int


def without_forcing(grammar: str) -> str:
    """Switch llguidance's search for forced text off in a grammar."""
    if grammar[:1] != "{":
        return _NO_FORCING + grammar
    parts = json.loads(grammar)
    first = parts["grammars"][0]
    first["lark_grammar"] = _NO_FORCING + first["lark_grammar"]
    return json.dumps(parts)


def _certain_step(mask: np.ndarray, texts: list[bytes]) -> _Step | None:
    """Return the shortest allowed token if all others begin with it; a control token if it is the only one."""
    shortest, reach = -1, 0
    for word in np.flatnonzero(mask):  # most often, the second token ends it
        bits = int(mask[word])
        while bits:
            token = 32 * int(word) + (bits & -bits).bit_length() - 1
            bits &= bits - 1
            text, known = texts[token], texts[shortest]
            if shortest < 0 or (text and known.startswith(text)):
                shortest = token
            elif not (known and text.startswith(known)):
                return None
            reach = max(reach, len(text))
    return None if shortest < 0 else _Step(shortest, texts[shortest], reach)


def _encoded(
    run: Sequence[_Step], tokenizer: LLTokenizer, texts: list[bytes], last: int | None
) -> list[int]:
    """Encode the text of a run of steps, without tokens at its end that a longer one could replace."""
    text = b"".join(step.text for step in run)
    at = sure = 0
    for step in run:
        if at + step.reach > len(text):
            break
        at += len(step.text)
        sure = at
    tokens = _tokens(text, tokenizer)
    if last is not None and (before := texts[last]):
        joined = _tokens(before + text, tokenizer)
        tokens = joined[1:] if joined[:1] == [last] else tokens
    ends = list(accumulate(len(texts[token]) for token in tokens))
    return tokens[: bisect_right(ends, sure)]


def _tokens(text: bytes, tokenizer: LLTokenizer) -> list[int]:
    """Encode a text; if it ends within a character, only that is encoded as bytes."""
    try:
        text.decode()
        end = len(text)
    except UnicodeDecodeError as error:
        end = error.start
    return tokenizer.tokenize_bytes(text[:end]) + tokenizer.tokenize_bytes(text[end:])


# -- completion

MAX_COMPLETION_BYTES = 4096
_MAX_BRANCHES = 30_000  # in all: a second, during which other rows wait
_PLACES = 32  # texts of one length that are continued
_BRANCHES = 6
_MARK = 16  # steps from anywhere in the mark of a thought, or in a character, to where the thought can end
_PREFERRED = b'"}]),:. \n01etrufalsn-{[(aA'


@dataclass(frozen=True)
class _Text:
    """A candidate in the search for the shortest completion: tokens, bytes, forced bytes, and matcher state."""

    tokens: tuple[int, ...]
    length: int
    forced: int
    state: Matcher

    def then(self, tokens: Sequence[int], forced: bool = False) -> _Text:
        """Append tokens, `forced` or chosen. Takes over `self.state`; don't use `self` afterwards."""
        more = len(self.state.tokenizer.decode_bytes(list(tokens)))
        for token in tokens:
            self.state.accept(token)
        whole = (*self.tokens, *tokens)
        return _Text(whole, self.length + more, self.forced + forced * more, self.state)


def shortest_completion(matcher: Matcher) -> list[int] | None:
    """Return the tokens that complete an answer: the shortest text, unless many things are open.

    A thought that is open ends first. None if no completion is found: it would exceed `MAX_COMPLETION_BYTES`,
    or the grammar needs something that the search misses, such as a word in the middle of a string.

    Args:
        matcher: the state of the answer so far; left unchanged.
    """
    tokens = _tokens_of_one_byte(matcher.tokenizer)
    closing, matcher = _end_of_thought(matcher, tokens), matcher.copy()
    for token in closing:
        matcher.accept(token)
    direct = _direct_completion(matcher, tokens)
    found = _searched_completion(matcher, tokens, _MAX_BRANCHES // (1 if direct is None else 20))
    rest = direct if found is None else found
    return None if rest is None else [*closing, *rest]


def _end_of_thought(matcher: Matcher, tokens: dict[bytes, int]) -> list[int]:
    """Return the tokens that end a thought that is open, or has to be opened; none if there is no such thought.

    The thought may stop within its mark or within a character.
    """
    state, closing = matcher.copy(), list[int]()
    for _ in range(_MARK if matcher.thought_end >= 0 else 0):
        mask = fill_masks([state])
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        if allowed[matcher.thought_end]:
            return [*closing, matcher.thought_end]
        more = state.forced()
        if not more:
            bytes_left = [(byte[0], token) for byte, token in tokens.items() if allowed[token]]
            is_sure = len(bytes_left) == 1 or all(0x80 <= byte < 0xC0 for byte, _ in bytes_left)
            more = [token for _, token in bytes_left[:1] if is_sure]
        if not more:
            break
        for token in more:
            state.accept(token)
        closing += more
    return []


def _direct_completion(matcher: Matcher, tokens: dict[bytes, int]) -> list[int] | None:
    """Close one string or bracket after the other; None if that finds no end."""
    text = _Text((), 0, 0, matcher.copy())
    while text.length < MAX_COMPLETION_BYTES and not text.state.is_complete:
        forced = text.state.forced()
        if not forced:
            mask = fill_masks([text.state])
            allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            choices = [byte for byte, token in tokens.items() if allowed[token]]
            if not choices:
                return None
            # Close a bracket; if both kinds are allowed, they are letters of a string.
            closing = [byte for byte in (b"}", b"]") if byte in choices]
            forced = [tokens[closing[0] if len(closing) == 1 else choices[0]]]
        text = text.then(forced)
    return list(text.tokens) if text.state.is_complete else None


def _searched_completion(
    matcher: Matcher, tokens: dict[bytes, int], max_branches: int
) -> list[int] | None:
    waiting: dict[int, list[_Text]] = defaultdict(list)
    waiting[0] = [_Text((), 0, 0, matcher.copy())]
    n_branches = 0
    for length in range(MAX_COMPLETION_BYTES):
        places: set[tuple[bytes, int]] = set()
        for known in sorted(waiting.pop(length, ()), key=lambda known: -known.forced):
            if known.state.is_complete:
                return list(known.tokens)
            if forced := known.state.forced():
                longer = known.then(forced, forced=True)
                waiting[longer.length].append(longer)
                continue
            mask = fill_masks([known.state])
            place = mask.tobytes(), known.forced
            if place in places or len(places) == _PLACES:
                continue
            places.add(place)
            allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            for token in [token for token in tokens.values() if allowed[token]][:_BRANCHES]:
                n_branches += 1
                branch = replace(known, state=known.state.copy())
                waiting[length + 1].append(branch.then([token]))
        if not waiting or n_branches > max_branches:
            return None
    return None


@lru_cache(maxsize=4)
def _tokens_of_one_byte(tokenizer: LLTokenizer) -> dict[bytes, int]:
    """Map bytes to their tokens, in the order in which they are tried."""
    found = byte_tokens(tokenizer)
    order = {byte: i for i, byte in enumerate(_PREFERRED)}
    return dict(sorted(found.items(), key=lambda pair: (order.get(pair[0][0], 256), pair[0])))

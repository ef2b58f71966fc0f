"""Training data: JSONL files to token ids, each with the weight of its loss.

`afm_mlx.jsonl` says what a line may be. The loss of a chat is that of the assistant's turns, as Apple's
adapter training toolkit masks it: the tokens behind `<turn_start> assistant<n>`, up to `<turn_end>` and
with it, have weight 1; all others have `prompt_weight`. A completion is a chat of two turns. Of a text,
every token but the first is predicted; a long one is cut into pieces that overlap by one token.

All lines are read before training starts, and those that can't be used are named; none is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from afm_mlx.errors import AFMError, DataError, shown
from afm_mlx.jsonl import (
    KINDS,
    ChatRecord,
    TextRecord,
    data_file,
    data_files,
    document_of,
    encode_text,
    is_data_file,
    parse_line,
    read_lines,
)
from afm_mlx.measure.perplexity import cut
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.chat_messages import Message, checked_messages, checked_tools

SPLITS = ("train", "valid", "test")
_FAULTS_SHOWN = 5

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence to learn from, of N tokens.

    Args:
        tokens: (N,) ids.
        weights: (N,) weights of the losses of predicting `tokens[i]` from those before it; `weights[0]`,
            which nothing predicts, is 0.
        where: "file:line", for messages.

    Raises:
        DataError: when the weights don't fit.
    """

    tokens: Sequence[int] | np.ndarray
    weights: Sequence[float] | np.ndarray
    where: str

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, np.float32)
        if len(self.weights) != len(self.tokens) or np.any(weights[:1] != 0):
            raise DataError(
                f"{self.where}: {len(self.tokens)} tokens with {len(self.weights)} weights, the first "
                f"{self.weights[:1]}; each token needs one, and that of the first is 0."
            )
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            raise DataError(f"{self.where}: weights must be finite, and 0 or more.")


def has_split(path: str | Path, split: str) -> bool:
    """True if `load_split` would find such a file. A path of a file is a train split alone."""
    path = Path(path)
    return data_file(path, split) is not None if path.is_dir() else split == "train"


def load_split(
    path: str | Path,
    split: str,
    tokenizer: Any,
    *,
    max_seq_length: int,
    prompt_weight: float = 0.0,
    features: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Read and tokenize a data set.

    Args:
        path: a folder with `train.jsonl`, `valid.jsonl`, `test.jsonl`, or files of these names in another
            format that `read_lines` knows; or one such file, which is then read whatever `split` says.
        split: "train", "valid" or "test".
        tokenizer: a tokenizer of `load`, AFM's or one of mlx-lm's zoo.
        max_seq_length: the most tokens of a sample. A longer text is cut, a longer chat is an error.
        prompt_weight: weight of the loss of tokens that the assistant did not write.
        features: the lines' keys for "prompt", "completion", "messages" or "text", by these names.
        progress: called with lines done and lines in all.

    Returns:
        Samples with int32 tokens and float32 weights, in the order of the file.

    Raises:
        DataError: names the first lines that can't be used, with reasons, and says how many more there are.
    """
    _check_options(split, max_seq_length, prompt_weight)
    file = _file_of(Path(path), split)
    samples: list[Sample] = []
    faults: list[str] = []
    lines = list(read_lines(file))
    for done, (where, line) in enumerate(lines, start=1):
        try:
            document = _document(parse_line(line), features or {})
            for tokens, weights in _sequences(document, tokenizer, max_seq_length, prompt_weight):
                samples.append(Sample(tokens, weights, where))
        except AFMError as error:
            faults.append(f"{where}: {error}")
        if progress is not None:
            progress(done, len(lines))
    if faults:
        more = len(faults) - _FAULTS_SHOWN
        rest = [f"... and {more} more."] if more > 0 else []
        raise DataError("\n".join(faults[:_FAULTS_SHOWN] + rest))
    if not samples:
        raise DataError(f"{file} holds no samples; each line must be one of {KINDS}.")
    return samples


def _check_options(split: str, max_seq_length: int, prompt_weight: float) -> None:
    if split not in SPLITS:
        raise DataError(f"There is no split {split!r}; allowed are {', '.join(SPLITS)}.")
    if max_seq_length < 2:
        raise DataError(f"max_seq_length is {max_seq_length}; a sample needs 2 tokens at least.")
    if not (math.isfinite(prompt_weight) and prompt_weight >= 0):
        raise DataError(f"prompt_weight is {prompt_weight}; it must be finite, and 0 or more.")


def _file_of(path: Path, split: str) -> Path:
    if not path.is_dir():
        if path.is_file() and not is_data_file(path):
            raise DataError(
                f"{path} is no data file, nor a folder with {split}.jsonl. Files of JSON lines are named "
                ".jsonl; .json, .csv and .tsv, and .gz of each are read, too."
            )
        return path
    file = data_file(path, split)
    if file is None:
        raise DataError(
            f"{path} has no {split}.jsonl, nor {split}.json or {split}.csv; its data files: "
            f"{data_files(path)}."
        )
    return file


def _document(record: Any, features: Mapping[str, str]) -> TextRecord | ChatRecord:
    """The text or the chat of a record whose keys have the names of `features`."""
    keys = record if isinstance(record, Mapping) else ()
    lacking = [f"{key!r} as the {name}" for name, key in features.items() if key not in keys]
    wrong = DataError(
        f"the line lacks {' and '.join(lacking)}; it has the keys {', '.join(map(str, keys)) or 'none'}. "
        "Name those (--prompt-feature, --completion-feature, --chat-feature, --text-feature)."
    )
    if keys and 0 < len(lacking) < len(features):
        raise wrong
    renamed = _renamed(record, features)
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        if keys and name in features and other not in features and other not in renamed:
            raise DataError(
                f"the line has no {other!r} beside {features[name]!r} as the {name}; it has the keys "
                f"{', '.join(map(str, keys))}. Name its key, too (--{other}-feature)."
            )
    try:
        return document_of(renamed)
    except DataError:
        if keys and lacking:
            raise wrong from None
        raise


def _renamed(record: Any, features: Mapping[str, str]) -> Any:
    """A record under our names."""
    if not features or not isinstance(record, Mapping):
        return record
    ours = {key: name for name, key in features.items()}
    # What has one of our names, and is called otherwise, is something else.
    return {
        ours.get(key, key): value
        for key, value in record.items()
        if key in ours or key not in features
    }


def _sequences(
    document: TextRecord | ChatRecord, tokenizer: Any, max_seq_length: int, prompt_weight: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and weights of the samples that a line holds."""
    if not isinstance(document, TextRecord):
        tokens, weights = encode_chat(document.messages, document.tools, tokenizer, prompt_weight)
        if len(tokens) > max_seq_length:
            raise DataError(
                f"a chat of {len(tokens)} tokens, and max_seq_length is {max_seq_length}. Chats are not "
                "cut: shorten it, or raise max_seq_length."
            )
        yield tokens, weights
        return
    if not document.text:
        raise DataError("'text' is empty. Remove the line.")
    whole = _guarded("text", lambda: encode_text(document.text, tokenizer))
    pieces = cut([whole], max_seq_length)
    if not pieces:
        raise DataError(f"a text of {len(whole)} tokens; nothing is left to predict. Remove it.")
    for piece in pieces:
        weights = np.ones(len(piece), np.float32)
        weights[0] = 0
        yield np.array(piece, np.int32), weights


# -- chats


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    tokenizer: Any,
    prompt_weight: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Render a chat as the tokenizer's template does, and weigh it.

    A turn's tokens are found by rendering the chat up to it with the start of an answer, and with the
    turn itself. With AFM's template they are those that tamm's preprocessor labels.

    Returns:
        Tokens (N,) int32, and weights (N,) float32.

    Raises:
        AFMError: what is wrong with the chat, or with a template that hides where a turn begins and ends.
    """
    if not tokenizer.has_chat_template:
        raise DataError("a chat, and the model's folder has no chat template.")
    checked = checked_messages(messages)
    _check_turns(checked)
    _check_calls(checked, tools)
    _check_argument_texts(messages)
    chat = _Chat(messages, checked, tools, tokenizer)
    weights = np.full(len(chat.tokens), prompt_weight, np.float32)
    weights[0] = 0
    end = 0
    for index, message in enumerate(checked):
        if message["role"] == "assistant":
            start, end = chat.span(index, end)
            weights[start:end] = 1
    return chat.tokens, weights


def _check_turns(messages: Sequence[Message]) -> None:
    if len(messages) < 2:
        raise DataError("a chat of one message; it needs a user's and an assistant's at least.")
    before = None
    for index, message in enumerate(messages):
        role = message["role"]
        if role == before and role not in ("tool", "function"):
            raise DataError(
                f"messages[{index - 1}] and messages[{index}] both have the role {role!r}; only tool "
                "results may follow each other. Join them."
            )
        if role == "assistant":
            if before not in ("user", "tool", "function"):
                raise DataError(
                    f"messages[{index}] is the assistant's and follows {before or 'nothing'}; an answer "
                    "follows the role user or tool."
                )
            if not message["content"].strip() and "tool_calls" not in message:
                raise DataError(
                    f"messages[{index}] is an empty assistant turn: no content and no tool calls."
                )
        elif role in ("user", "system") and not (message["content"].strip() or "tools" in message):
            raise DataError(f"messages[{index}] is an empty turn of the role {role!r}. Remove it.")
        before = role
    if before != "assistant":
        raise DataError(f"the chat ends with the role {before!r}; it must end with 'assistant'.")


def _check_calls(messages: Sequence[Message], tools: Any) -> None:
    """Raise `DataError` for calls that are not of the chat's tools, and for results without a call."""
    known = [*(checked_tools(tools) if tools else ()), *messages[0].get("tools", ())]
    waiting = 0  # calls without a result yet
    for index, message in enumerate(messages):
        if message["role"] in ("tool", "function"):
            if isinstance(message["content"], list):  # new tools, which no call asks for
                known += message["content"]
                continue
            waiting -= 1
            if waiting < 0:
                raise DataError(
                    f"messages[{index}] is a tool's result, and no call before it is without one. Add the "
                    "call, as tool_calls of the assistant, or remove the result."
                )
            continue
        calls = message.get("tool_calls", ())
        waiting = len(calls)
        functions = [tool.get("function", tool) for tool in known]
        names = {
            f["name"]
            for f in functions
            if isinstance(f, Mapping) and isinstance(f.get("name"), str)
        }
        for number, call in enumerate(calls):
            where = f"messages[{index}].tool_calls[{number}]"
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(arguments, Mapping):
                raise DataError(
                    f'{where}: the arguments {shown(arguments)} are no JSON object, as {{"at": 1}} is one.'
                )
            if name not in names:
                have = ", ".join(sorted(names)) or "none"
                raise DataError(
                    f"{where} calls {shown(name)}, which is no tool of the chat; it has {have}. Give its "
                    'definition: "tools" beside the messages.'
                )


def _check_argument_texts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `DataError` for arguments, written as JSON text, in which an object has a key twice."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str):
                try:
                    parse_line(arguments)
                except DataError as error:
                    where = f"messages[{index}].tool_calls[{number}]"
                    raise DataError(f"{where}: in the arguments, {error}") from None


class _Chat:
    """A chat's rendered text and tokens, and where in them the assistant's turns are."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        checked: Sequence[Message],
        tools: Any,
        tokenizer: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_afm = hasattr(tokenizer, "separator_id")
        self._messages = messages if self._is_afm else list(map(_for_zoo, messages, checked))
        self._tools = tools
        own_tools = checked[0].get("tools")
        if not self._is_afm and own_tools:
            if tools:
                raise DataError("tools are given twice: with the chat and with messages[0].")
            self._tools = own_tools
        self._refuse_ignored_fields(checked, tools or own_tools)
        self._text = self._render(len(messages))
        self.tokens = self._encode(self._text, len(messages))

    def span(self, index: int, earliest: int) -> tuple[int, int]:
        """First token of the assistant's message `index`, and the one behind its last."""
        start = max(earliest, self._start(index))
        end = self._end(index, start)
        # What a template writes behind the end of a turn is not the assistant's.
        end = max(self._ends(start, end), default=end)
        if start >= end:
            raise DataError(f"messages[{index}]: the chat template renders nothing for this turn.")
        return start, end

    def _start(self, index: int) -> int:
        head = self._render(index, add_generation_prompt=True)
        if not self._text.startswith(head):
            # Templates of reasoning models start an answer with a thought that past answers lack.
            shared = commonprefix([head, self._text])  # noqa: RUF071  characters are meant
            if not shared.startswith(self._render(index)):
                raise DataError(
                    f"messages[{index}]: the model's chat template renders the messages before it "
                    "differently when more follow, so the assistant's turns can't be told from the rest. "
                    "Use a template without that, or data as {'text'}."
                )
            head = shared
        ids = self._encode(head, index, add_generation_prompt=True)
        return _shared_length(ids, self.tokens)

    def _end(self, index: int, start: int) -> int:
        if index + 1 == len(self._messages):
            return len(self.tokens)
        upto = self._render(index + 1)
        if self._text.startswith(upto):
            return _shared_length(self._encode(upto, index + 1), self.tokens)
        ends = self._ends(start, None)
        if not ends:
            raise DataError(
                f"messages[{index}]: the model's chat template renders this turn differently when more "
                "follow, and ends it with no stop token, so its end can't be found."
            )
        return ends[0]

    def _ends(self, start: int, end: int | None) -> list[int]:
        """Behind every stop token from `start` to `end`."""
        stops = np.isin(self.tokens[start:end], list(self._tokenizer.eos_token_ids))
        return (start + 1 + np.flatnonzero(stops)).tolist()

    def _render(self, count: int, tokenize: bool = False, **variables: Any) -> Any:
        return _guarded(
            "chat",
            lambda: self._tokenizer.apply_chat_template(
                self._messages[:count], tools=self._tools, tokenize=tokenize, **variables
            ),
        )

    def _encode(self, text: str, count: int, **variables: Any) -> np.ndarray:
        """The ids of the first `count` messages, which are rendered as `text`."""
        if self._is_afm:  # the text doesn't tell control tokens from what messages say
            return np.array(self._render(count, tokenize=True, **variables), np.int32)
        # Templates of the zoo write the first token out.
        tokens = _guarded("chat", lambda: self._tokenizer.encode(text, add_special_tokens=False))
        return np.array(tokens, np.int32)

    def _refuse_ignored_fields(self, checked: Sequence[Message], tools: Any) -> None:
        template = getattr(self._tokenizer, "chat_template", None)
        if not isinstance(template, str):
            return
        fields = {field for message in checked for field in message}
        used = fields & {"tool_calls", "response_format"} | ({"tools"} if tools else set())
        ignored = sorted(field for field in used if field not in template)
        if ignored:
            raise DataError(
                f"the chat has {', '.join(ignored)}, which the model's chat template does not use."
            )


def _for_zoo(message: Mapping[str, Any], checked: Message) -> Message:
    """A message as templates of mlx-lm's zoo have it: text as a string, arguments decoded."""
    rendered = {key: value for key, value in message.items() if key != "tools"}
    if message.get("content") is not None:
        rendered["content"] = checked["content"]
    if "tool_calls" in checked:
        rendered["tool_calls"] = [
            {**call, **own}
            for call, own in zip(message["tool_calls"], checked["tool_calls"], strict=True)
        ]
    return rendered


def _shared_length(first: np.ndarray, second: np.ndarray) -> int:
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if len(different) else n


def _guarded(what: str, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except AFMError:
        raise
    except Exception as error:  # templates and tokenizers of others fail in any way that Python can
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the model's tokenizer can't take this {what} ({reason}).") from error

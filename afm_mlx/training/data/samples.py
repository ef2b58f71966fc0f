"""Training data: JSONL files to token ids, each with the weight of its loss.

`afm_mlx.jsonl` has the formats of a line. In a chat, the loss counts the assistant's turns, as in Apple's
adapter training toolkit: the tokens after `<turn_start> assistant<n>`, up to and including `<turn_end>`, have
weight 1; images' tokens have 0, and all others `prompt_weight`. A completion is a chat of two turns. In a text,
every token except the first is predicted; a long text is cut into pieces that overlap by one token.

All lines are read before training starts. Lines that can't be used are an error that names them; none is
skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from afm_mlx.engine.image_features import PlacedImage, placed_images
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
    parse_records,
)
from afm_mlx.measure.perplexity import cut
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.chat_messages import Message, checked_messages, checked_tools
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.vision.message_images import with_images

SPLITS = ("train", "valid", "test")

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Sample:
    """A training sequence of N tokens.

    Args:
        tokens: (N,) ids.
        weights: (N,) weights of the losses of predicting `tokens[i]` from the tokens before it; `weights[0]` is
            0, since the first token is not predicted.
        where: "file:line", for messages.
        images: its images, with the places of their tokens.

    Raises:
        DataError: when the weights don't fit.
    """

    tokens: Sequence[int] | np.ndarray
    weights: Sequence[float] | np.ndarray
    where: str
    images: Sequence[PlacedImage] = ()

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, np.float32)
        if len(self.weights) != len(self.tokens) or np.any(weights[:1] != 0):
            raise DataError(
                f"{self.where}: {len(self.tokens)} tokens with {len(self.weights)} weights, the first "
                f"{self.weights[:1]}; each token needs a weight, and the first token's is 0."
            )
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            raise DataError(f"{self.where}: weights must be finite, and 0 or more.")


def has_split(path: str | Path, split: str) -> bool:
    """Return True if `load_split` would find a file. The path of a file has a train split only."""
    path = Path(path)
    return data_file(path, split) is not None if path.is_dir() else split == "train"


def load_split(
    path: str | Path,
    split: str,
    tokenizer: Tokenizer,
    *,
    max_seq_length: int,
    prompt_weight: float = 0.0,
    features: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Read and tokenize a split of a data set.

    Args:
        path: a folder with `train.jsonl`, `valid.jsonl`, `test.jsonl`, or files of these names in another
            format of `read_lines`; or one such file, which is read for any `split`.
        split: "train", "valid" or "test".
        tokenizer: the model's tokenizer.
        max_seq_length: maximum number of tokens in a sample. A longer text is cut, a longer chat is an error.
        prompt_weight: loss weight of tokens of text that the assistant did not write.
        features: maps "prompt", "completion", "messages" or "text" to the key that the file uses for it.
        progress: called after each line with the number of finished lines and the number of all lines.

    Returns:
        Samples with int32 tokens and float32 weights, in the order of the file.

    Raises:
        DataError: names the first lines that can't be used, with reasons, and the number of others.
    """
    if max_seq_length < 2:
        raise DataError(f"max_seq_length is {max_seq_length}; a sample needs 2 tokens at least.")
    if not (math.isfinite(prompt_weight) and prompt_weight >= 0):
        raise DataError(f"prompt_weight is {prompt_weight}; it must be finite, and 0 or more.")

    folder = folder_of(path)

    def samples_of(record: object, where: str) -> list[Sample]:
        document = _document(record, features or {})
        if isinstance(document, TextRecord):
            sequences = _pieces(document.text, tokenizer, max_seq_length)
            return [Sample(tokens, weights, where) for tokens, weights in sequences]
        tokens, weights, images = read_chat(
            document.messages, document.tools, tokenizer, folder, prompt_weight
        )
        if len(tokens) > max_seq_length:
            raise DataError(
                f"a chat of {len(tokens)} tokens, and max_seq_length is {max_seq_length}. Chats are "
                "not cut: shorten it, or raise max_seq_length."
            )
        return [Sample(tokens, weights, where, images)]

    return read_records(path, split, samples_of, KINDS, progress)


def folder_of(path: str | Path) -> Path:
    """Return the folder to which images' paths in a data set are relative; `path` is as in `load_split`."""
    path = Path(path)
    return path if path.is_dir() else path.parent


def read_chat(
    messages: Sequence[Any],
    tools: Tools,
    tokenizer: Tokenizer,
    folder: Path,
    prompt_weight: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, list[PlacedImage]]:
    """Tokenize an unchecked chat of a data file as `encode_chat` does, and read its images.

    Paths of images are relative to `folder`. Returns tokens (N,), weights (N,), and the images with the places
    of their tokens, whose weights are 0: nothing is to predict in an image.
    """
    config = getattr(tokenizer, "vision_config", None)
    if config is None:
        return *encode_chat(messages, tools, tokenizer, prompt_weight), []
    images = ChatImages()
    messages = with_images(messages, config, folder)
    tokens, weights = encode_chat(messages, tools, tokenizer, prompt_weight, images)
    placed = placed_images(tokens, images.placed, config.image_token_id)
    for each in placed:
        weights[each.places] = 0
    return tokens, weights, placed


def read_records(
    path: str | Path,
    split: str,
    parse: Callable[[object, str], list[_T]],
    kinds: str,
    progress: Progress | None = None,
) -> list[_T]:
    """Read a split of a data set, as `load_split` does, by a function of a record and its "file:line".

    The other arguments and errors are as of `jsonl.parse_records`.
    """
    if split not in SPLITS:
        raise DataError(f"There is no split {split!r}; allowed are {', '.join(SPLITS)}.")
    return parse_records(_file_of(Path(path), split), parse, kinds, progress=progress)


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


def _document(record: object, features: Mapping[str, str]) -> TextRecord | ChatRecord:
    """Return the text or chat in a record; `features` maps standard names of keys to the record's own."""
    if not features or not isinstance(record, Mapping):
        return document_of(record)
    missing = [f"{key!r} as the {name}" for name, key in features.items() if key not in record]
    keys = ", ".join(map(str, record))
    wrong = DataError(
        f"the line lacks {' and '.join(missing)}; it has the keys {keys or 'none'}. "
        "Name those (--prompt-feature, --completion-feature, --chat-feature, --text-feature)."
    )
    if record and 0 < len(missing) < len(features):
        raise wrong
    standard = {key: name for name, key in features.items()}
    # A key with a standard name that `features` maps from another key has another meaning.
    renamed = {
        standard.get(key, key): value
        for key, value in record.items()
        if key in standard or key not in features
    }
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        if record and name in features and other not in features and other not in renamed:
            raise DataError(
                f"the line has {features[name]!r} as the {name}, and no {other!r}; it has the keys "
                f"{keys}. Name its key, too (--{other}-feature)."
            )
    try:
        return document_of(renamed)
    except DataError:
        if record and missing:
            raise wrong from None
        raise


def _pieces(
    text: str, tokenizer: Tokenizer, max_seq_length: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens (N,) and weights (N,) of the pieces of a text, N up to `max_seq_length`."""
    if not text:
        raise DataError("'text' is empty. Remove the line.")
    whole = _guarded("text", lambda: encode_text(text, tokenizer))
    pieces = cut([whole], max_seq_length)
    if not pieces:
        raise DataError(f"a text of {len(whole)} tokens; nothing is left to predict. Remove it.")
    return [(np.array(p, np.int32), (np.arange(len(p)) > 0).astype(np.float32)) for p in pieces]


# -- chats


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    tokenizer: Tokenizer,
    prompt_weight: float = 0.0,
    images: ChatImages | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a chat with the tokenizer's template, and weight its tokens.

    Parts of messages may hold an image if `images` are given; `images.placed` then has the chat's images.

    A turn's tokens are found by rendering the chat before the turn with the start of an answer, and the chat
    up to the turn's end. With AFM's template, these are the tokens that tamm's preprocessor labels.

    Returns:
        Tokens (N,) int32, and weights (N,) float32.

    Raises:
        AFMError: for a chat that can't be used, or a template in which a turn's begin or end can't be found.
    """
    if not tokenizer.has_chat_template:
        raise DataError("a chat, and the model's folder has no chat template.")
    checked = checked_messages(messages, images)
    _check_turns(checked)
    _check_calls(checked, tools)
    for index, message in enumerate(messages):  # no key twice in arguments of JSON text
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str):
                try:
                    parse_line(arguments)
                except DataError as error:
                    where = f"messages[{index}].tool_calls[{number}]"
                    raise DataError(f"{where}: in the arguments, {error}") from None
    chat = _Chat(messages, checked, tools, tokenizer, images)
    placed = () if images is None else images.placed
    weights = np.full(len(chat.tokens), prompt_weight, np.float32)
    weights[0] = 0
    end = 0
    for index, message in enumerate(checked):
        if message["role"] == "assistant":
            if images is not None and images.find(message["content"]):
                raise DataError(
                    f"messages[{index}] is the assistant's and has an image, and answers are text. Move the "
                    "image to a message of the user."
                )
            start, end = chat.span(index, end)
            weights[start:end] = 1
    if images is not None:
        images.placed = placed  # `span` has encoded parts of the chat
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


def _check_calls(messages: Sequence[Message], tools: Tools) -> None:
    """Raise `DataError` for calls of tools that the chat does not have, and for results without a call."""
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
        functions = [f for tool in known if isinstance(f := tool.get("function", tool), Mapping)]
        names = {f["name"] for f in functions if isinstance(f.get("name"), str)}
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
                    'definition under "tools".'
                )


class _Chat:
    """A chat's rendered text and tokens, and the positions of the assistant's turns."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        checked: Sequence[Message],
        tools: Tools,
        tokenizer: Tokenizer,
        images: ChatImages | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images: dict[str, Any] = {} if images is None else {"images": images}
        self._is_afm = hasattr(tokenizer, "separator_id")
        self._messages = messages if self._is_afm else list(map(_for_zoo, messages, checked))
        self._tools = tools
        own_tools = checked[0].get("tools")
        if not self._is_afm and own_tools:
            if tools:
                raise DataError("tools are given twice: with the chat and with messages[0].")
            self._tools = own_tools
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, str):
            fields = {field for message in checked for field in message}
            used = fields & {"tool_calls", "response_format"}
            used |= {"tools"} if tools or own_tools else set()
            if ignored := sorted(field for field in used if field not in template):
                raise DataError(
                    f"the chat has {', '.join(ignored)}, which the model's chat template does not use."
                )
        self._text = self._render(len(messages))
        self.tokens = self._encode(len(messages))

    def span(self, index: int, earliest: int) -> tuple[int, int]:
        """Return the token positions [start, end) of the assistant's message `index`; start >= `earliest`."""
        head = self._render(index, start=True)
        if not self._text.startswith(head):
            # Templates of reasoning models start an answer with a thought, which past answers don't have.
            shared = commonprefix([head, self._text])  # noqa: RUF071  characters are meant
            if not shared.startswith(self._render(index)):
                raise DataError(
                    f"messages[{index}]: the model's chat template renders the messages before it "
                    "differently when more follow, so the assistant's turns can't be found. "
                    "Use a template without that, or data as {'text'}."
                )
        start = max(earliest, _shared_length(self._encode(index, start=True), self.tokens))
        end = len(self.tokens)
        if index + 1 < len(self._messages):
            upto = self._render(index + 1)
            if self._text.startswith(upto):
                end = _shared_length(self._encode(index + 1), self.tokens)
            elif ends := self._ends(start, None):
                end = ends[0]
            else:
                raise DataError(
                    f"messages[{index}]: the model's chat template renders this turn differently when more "
                    "follow, and ends it with no stop token, so its end can't be found."
                )
        # Text that a template adds after the end of a turn is not the assistant's.
        end = max(self._ends(start, end), default=end)
        if start >= end:
            raise DataError(f"messages[{index}]: the chat template renders nothing for this turn.")
        return start, end

    def _ends(self, start: int, end: int | None) -> list[int]:
        """Return the index after each stop token in [start, end); end=None means the end of the chat."""
        stops = np.isin(self.tokens[start:end], list(self._tokenizer.eos_token_ids))
        return (start + 1 + np.flatnonzero(stops)).tolist()

    def _render(self, count: int, start: bool = False) -> str:
        """Render the first `count` messages as text; if `start`, add the start of the assistant's next turn."""
        return self._template(count, start, tokenize=False)

    def _encode(self, count: int, start: bool = False) -> np.ndarray:
        """Return the ids of what `_render` returns, whose text doesn't tell control tokens from typed names."""
        return np.array(self._template(count, start, tokenize=True), np.int32)

    def _template(self, count: int, start: bool, tokenize: bool) -> Any:
        apply: Any = self._tokenizer.apply_chat_template
        options = {"tools": self._tools, "add_generation_prompt": start, "tokenize": tokenize}
        options |= self._images
        return _guarded("chat", lambda: apply(self._messages[:count], **options))


def _for_zoo(message: Mapping[str, Any], checked: Message) -> Message:
    """Return a message for templates of mlx-lm's zoo: text as a string, arguments decoded."""
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
    except Exception as error:  # other packages' templates and tokenizers raise any exception
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the model's tokenizer can't take this {what} ({reason}).") from error

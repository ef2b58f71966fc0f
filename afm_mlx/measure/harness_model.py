"""lm-evaluation-harness's ("lm-eval's") class of models, on this package's engine.

    model = HarnessModel("afm-nano")
    results = lm_eval.simple_evaluate(model, tasks=["arc_easy"])

A text becomes tokens as in lm-eval's other classes: a context and its continuation are encoded together, and
the tokens behind the context's own are the continuation's. The model's start token comes first.

Importing this module imports lm-eval, which the extra `evaluate` installs, and registers the class as "afm".
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM, hash_args
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from mlx.utils import tree_flatten

from afm_mlx import __version__
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import encode_prompt
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import PromptScores, Request, Sampler
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import ContextLengthError, DataError, shown
from afm_mlx.guidance.answer_parts import splitter_for
from afm_mlx.guidance.thoughts import thought_form
from afm_mlx.jsonl import AppendedLines
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.measure.continuations import PREFIX_MEMORY, score_continuations
from afm_mlx.measure.evaluation import answer_text
from afm_mlx.model.model import is_afm
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.progress import Progress
from afm_mlx.ranks import ALONE, Ranks

Bars = Callable[[str, str], AbstractContextManager[Progress | None]]
"""Called with a description and a unit; returns a context with a function that reports progress, or None."""

_TOKENS = 256  # of an answer, if neither the task nor the caller limits it; lm-eval's default
_GENERATION = {
    *("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"),
    "num_beams",
}


def _no_bars(description: str, unit: str) -> AbstractContextManager[None]:
    return nullcontext()


@register_model("afm")
class HarnessModel(TemplateLM):
    """A model of `load` as lm-eval's model.

    Continuations of a context share its prefill, and requests run in the order of their contexts. A context
    that is too long loses its beginning. Equal requests are answered once, except those that sample.

    Args:
        pretrained: folder, hub id, or "afm-nano".
        batch_size: maximum number of rows that run at the same time.
        max_tokens: maximum number of new tokens of an answer; pass None for the task's number, or 256.
        chat_template_args: variables for the chat template, such as {"enable_thinking": False}.
        seed: seed of answers that a task wants sampled.
        bars: makes progress bars.
        ranks: processes that split requests; each has all answers.
        loading: other options of `load`, such as `adapter_path`.

    Attributes:
        model, tokenizer: what `load` returned.
        ranks: the argument.
        max_length: tokens that a context and its continuation or answer have together, at most.
        answer_count: number of answers that `keep_answers` has found in the file.

    Raises:
        AFMError: as `load` does.
    """

    def __init__(
        self,
        pretrained: str = EMBEDDED_MODEL,
        batch_size: int | str = 8,
        max_tokens: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        seed: int = 123,
        bars: Bars = _no_bars,
        ranks: Ranks = ALONE,
        **loading: Any,
    ):
        super().__init__()
        self.model, self.tokenizer = load(pretrained, **loading)
        self.batch_size, self.max_tokens = int(batch_size), max_tokens
        self.chat_template_args = dict(chat_template_args or {})
        self.seed = seed
        self._loading = loading
        self._thoughts = thought_form(self.tokenizer)
        length = "context_length" if is_afm(self.model) else "max_position_embeddings"
        self.max_length: int = getattr(self.model.args, length, None) or sys.maxsize
        self._bars = bars
        self.ranks = ranks
        self._answers: dict[str, Any] = {}  # by request
        self._file: AppendedLines | None = None
        self.answer_count = 0
        self._is_chat = False
        # Continuations of a context share its ids, which saves memory.
        self._encode = lru_cache(2)(self._encode_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Return entries of the results' `config`."""
        return {"model": "afm", "afm_mlx_version": __version__}

    # -- the texts of requests

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the model's start token, or else its end token."""
        if is_afm(self.model):
            return self.tokenizer.separator_id
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat; without a generation prompt, its last message is left open."""
        self._is_chat = True
        return self.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text; by default with the model's start token, unless the text begins with it."""
        if add_special_tokens is None:
            return self._encode(string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _encode_prompt(self, text: str) -> list[int]:
        # Chat templates write the start token themselves, except AFM's.
        if self._is_chat and not is_afm(self.model):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return encode_prompt(self.tokenizer, text)

    # -- requests

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and True if the model would generate it."""
        score = super().loglikelihood
        found = self._answered(
            "loglikelihood", requests, lambda left: score([*left.values()], True)
        )
        return [(total, is_greedy) for total, is_greedy in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of `max_length` if it is longer."""
        return self._answered("loglikelihood_rolling", requests, self._score_texts)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return an answer to each prompt, without thoughts, up to the first of the task's stop strings."""
        return self._answered("generate_until", requests, self._generate)

    def _answered(
        self,
        kind: str,
        requests: Sequence[Instance],
        answer: Callable[[dict[str, Instance]], object],
    ) -> list[Any]:
        """Return the answers to requests; `answer` keeps an answer to each that has none, by its key."""
        repeats = Counter[str]()
        keys, asked = [], {}
        # Ranks split contexts, whose continuations share a prefill.
        contexts = defaultdict[str, list[str]](list)
        for request in requests:
            key = hash_args(kind, request.args)
            if kind == "generate_until" and normalize_gen_kwargs(request.args[1])["do_sample"]:
                repeats[key] += 1
                key += f"-{repeats[key]}"
            keys.append(key)
            if key not in asked:
                contexts[request.args[0]].append(key)
            asked[key] = request

        def answered(own: list[list[str]]) -> list[dict[str, Any]]:
            mine = [key for group in own for key in group]
            if left := {key: asked[key] for key in mine if key not in self._answers}:
                answer(left)
            return [{key: self._answers[key] for key in group} for group in own]

        found: dict[str, Any] = {}
        for answers in self.ranks.each([*contexts.values()], answered):
            found |= answers
        return [found[key] for key in keys]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs, cut = [], 0
        for texts, context, continuation in requests:
            room = self.max_length - len(continuation)
            if room < 1:
                raise DataError(
                    f"The continuation {shown(texts[1])} has {len(continuation)} tokens, and the model's "
                    f"context holds {self.max_length} with the token before it."
                )
            cut += len(context) > room
            kept = context if len(context) <= room else context[-room:]
            pairs.append((kept or [self.prefix_token_id], continuation))
        self._warn_of_cuts(cut, len(pairs))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for index, scores in self._scored(pairs):
            found[index] = scores.total, scores.is_greedy
            self._keep(hash_args("loglikelihood", requests[index][0]), found[index])
        return found

    def _score_texts(self, left: dict[str, Instance]) -> None:
        windows: list[tuple[list[int], list[int]]] = []
        keys: list[str] = []  # of the windows' texts
        for key, request in left.items():
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            # A window is scored after one token.
            spans = (self.prefix_token_id, self.max_length - 1, 1)
            windows += map(make_disjoint_window, get_rolling_token_windows(tokens, *spans))
            keys += [key] * (len(windows) - len(keys))
            if not tokens:
                self._keep(key, 0.0)
        waiting, totals = Counter(keys), defaultdict[str, list[float]](list)
        for index, scores in self._scored(windows):
            key = keys[index]
            totals[key].append(scores.total)
            if len(totals[key]) == waiting[key]:
                self._keep(key, sum(totals[key]))

    def _scored(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> Iterator[tuple[int, PromptScores]]:
        with self._bars("scoring", "request") as progress:
            scored = score_continuations(
                self.model, self.tokenizer, pairs, batch_size=self.batch_size
            )
            for done, found in enumerate(scored, start=1):
                yield found
                if progress is not None:
                    progress(done, len(pairs))

    def _generate(self, left: dict[str, Instance]) -> None:
        engine = Engine(
            self.model,
            self.tokenizer,
            max_batch=self.batch_size,
            prefix_cache=PrefixCache(PREFIX_MEMORY),
        )
        made = {key: self._request(key, request) for key, request in left.items()}
        self._warn_of_cuts(sum(is_cut for *_, is_cut in made.values()), len(made))
        rows, texts = {}, dict.fromkeys(made, "")
        for key, (request, _, _) in sorted(made.items(), key=lambda item: [*item[1][0].prompt]):
            splitter = splitter_for(None, (), self._thoughts, request.prompt)
            rows[engine.submit(request)] = key, splitter
        done = 0
        with self._bars("answering", "request") as progress, wired_memory(self.model):
            for response in engine.run():
                key, splitter = rows[response.row]
                texts[key] += answer_text(splitter, response)
                # An answer that fills the context ends there.
                if response.error is not None and not isinstance(
                    response.error, ContextLengthError
                ):
                    raise response.error
                if response.finish_reason is None:
                    continue
                # Stop strings end answers, and thoughts have none.
                self._keep(key, postprocess_generated_text(texts[key], made[key][1], None))
                done += 1
                if progress is not None:
                    progress(done, len(made))

    def _request(self, key: str, request: Instance) -> tuple[Request, list[str], bool]:
        """Make the engine's request; return it, the stop strings, and True if its context is cut."""
        context, given = request.args
        options = normalize_gen_kwargs(given, _TOKENS)
        if unknown := {name: options[name] for name in options.keys() - _GENERATION}:
            raise DataError(
                f"A task's generation_kwargs have {shown(unknown)}; answers can have "
                f"{', '.join(sorted(_GENERATION))}."
            )
        if options.get("num_beams", 1) != 1:
            raise DataError(
                f"A task's generation_kwargs have num_beams {shown(options['num_beams'])}; answers are written "
                "one token at a time, which is num_beams 1."
            )
        most = self.max_tokens or max(1, options["max_gen_toks"])
        prompt = self.tok_encode(context)
        # An answer may fill half of the context at most, as far as the prompt is concerned.
        kept = prompt[-max(self.max_length - most, self.max_length // 2, 1) :]
        until = [text for text in options["until"] if text]
        sampler: Sampler | None = None
        if options["do_sample"] and (temperature := given.get("temperature", 1.0)):
            names = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
            sampler = make_sampler(temperature, **{n: options.get(n, v) for n, v in names.items()})
        made = Request(
            kept,
            most,
            sampler=sampler,
            seed=(self.seed + zlib.crc32(key.encode())) % 2**32,
            stop=until if self._thoughts is None else (),
            logprobs=False,
        )
        return made, until, len(kept) < len(prompt)

    def _warn_of_cuts(self, cut: int, total: int) -> None:
        if cut:
            warnings.warn(
                f"{cut} of {total} contexts lose their beginning: the model's context holds "
                f"{self.max_length} tokens. Fewer examples (--num-shots) make them shorter.",
                stacklevel=2,
            )

    # -- answers in a file

    def keep_answers(self, folder: Path) -> Path:
        """Append answers to a file in a folder from now on, and take the answers in it; return the file.

        The file's name stands for the model, its adapter and the options that change answers. Its lines are
        JSON: lm-eval's own cache has pickles, which run code when they are read.

        Raises:
            DataError: if the file is damaged.
        """
        options = [__version__, self.max_tokens, self.seed, repr(sorted(self._loading.items()))]
        if self.ranks.size > 1:
            options += [self.ranks.rank, self.ranks.size]
        name = arrays_fingerprint(options, dict(tree_flatten(self.model.parameters())))
        self._file = AppendedLines(folder / f"answers-{name[:16]}.jsonl")
        try:
            self._answers = dict(self._file.values)
        except (ValueError, TypeError):
            raise DataError(
                f"{self._file.path} is damaged. Remove it; all requests are then answered again."
            ) from None
        self.answer_count = len(self._answers)
        return self._file.path

    def _keep(self, key: str, answer: Any) -> None:
        self._answers[key] = answer
        if self._file is not None:
            self._file.append([key, answer])

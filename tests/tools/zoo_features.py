"""The table of features in docs/models.md, made by running each cell: python -m tests.tools.zoo_features

A feature is a function that compares what a guest does with what stock mlx-lm does, or with what was asked for.
It raises one of `REFUSALS` where the feature is refused; whatever else it raises is a fault.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jsonschema
import mlx.core as mx
import mlx_lm
import numpy as np
import openai

from afm_mlx import fm
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.cli import main
from afm_mlx.converters.convert import convert
from afm_mlx.coreai import CoreAIModel
from afm_mlx.engine.request import Embedding, Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import AFMError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load
from afm_mlx.measure.evaluation import Example, evaluate
from afm_mlx.measure.perplexity import measure_perplexity
from afm_mlx.model.pooling import hidden_states
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import train_lora, train_qat
from tests.tools.compare import assert_close, error
from tests.tools.engines import wanted_logprobs
from tests.tools.zoo import zoo_model
from tests.tools.zoo_guests import ARCHITECTURES, QUESTION, Guest

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WORKS = "works"
Cells = dict[str, str]
"""By feature: `WORKS`, or the reason for which it is refused."""

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Porto", "Faro"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
_HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Faro"}}\n</tool_call>'
CALLS = {
    "qwen3": _HERMES,
    "falcon h1": _HERMES,
    "llama3": '{"name": "weather", "parameters": {"city": "Faro"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Faro"}}]',
    "harmony": "<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Faro"}<|call|>',
    "lfm2": '<|tool_call_start|>[weather(city="Faro")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Faro<|"|>}<tool_call|>',
}
"""The call of `weather` for Faro, as a family's own template writes it; AFM's for others."""
_AFM_CALL = (
    '<executable_start> ```function\n[{"name": "weather", "arguments": {"city": "Faro"}}]```'
    "<executable_end>"
)
_FINAL = "<|channel|>final<|message|>"
_BEHIND_RESULTS = {"harmony": _FINAL, "gemma4": "<channel|>"}
"""Ends what a template begins behind results of tools."""
THOUGHTS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{_FINAL}"),
}
"""What a family's models write before and after a thought."""


class RefusedError(Exception):
    """A command that ended with the status of what a user got wrong, and its message."""


REFUSALS = (AFMError, RefusedError, fm.GenerationError, openai.BadRequestError)
Feature = Callable[[Guest], None]
FEATURES: dict[str, Feature] = {}
SLOW = (
    "Core ML package",
    "Core AI bundle",
    "LoRA adapters, trained and swapped",
    "recovery adapters",
    "quantization-aware training",
)
"""Features that take half of the time of all."""


def feature(name: str) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[name] = function
        return function

    return add


# -- tokens


@feature("tokens of stock mlx-lm, in ragged batches")
def _ragged_batches(guest: Guest) -> None:
    prompts = [guest.prompt(n) for n in (3, 40, 17)]
    wanted = [guest.greedy(prompt, 8) for prompt in prompts]
    assert guest.tokens(*(Request(p, 8, logprobs=False) for p in prompts), max_batch=2) == wanted


@feature("speculation by look-up")
def _lookup(guest: Guest) -> None:
    prompt = guest.prompt(5) * 6
    speculation = Speculation(prompt_lookup=True, num_draft_tokens=4)
    (row,) = guest.responses(Request(prompt, 10, logprobs=False), speculation=speculation)
    assert [r.token for r in row] == guest.greedy(prompt, 10)
    assert row[-1].draft_counts.proposed


@feature("speculation with a draft model")
def _with_a_draft(guest: Guest) -> None:
    _speculate(guest, guest.loaded[0], zoo_model("llama", guest.vocab_size, 1), guest.stock[0])


@feature("is a draft model")
def _as_a_draft(guest: Guest) -> None:
    target = zoo_model("llama", guest.vocab_size, 1)
    _speculate(guest, target, guest.loaded[0], target)


def _speculate(guest: Guest, model: Any, draft: Any, stock: Any) -> None:
    prompt = guest.prompt(20)
    request = Request(prompt, 8, logprobs=False)
    (row,) = guest.responses(request, model=model, speculation=Speculation(draft))
    assert [r.token for r in row] == guest.greedy(prompt, len(row), stock)
    assert row[-1].draft_counts.proposed


@feature("prefix cache in the second turn")
def _second_turn(guest: Guest) -> None:
    if not guest.has_chats:  # a text that goes on behind its continuation
        first = guest.prompt(9)
        second = [*first, *guest.greedy(first, 6), *guest.prompt(5)]
        guest.complete(first)
        made = guest.complete(second)
        assert made.usage.prompt_tokens_details.cached_tokens == len(first) + 5
        assert made.choices[0].text.strip() == guest.text(second, 6)
        return
    first = guest.ask(max_tokens=6)
    said = first.choices[0].message.content
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And in Faro?"}]
    made = guest.ask(*more, max_tokens=6)
    ids = guest.chat_ids(*more)
    assert made.usage.prompt_tokens == len(ids)
    assert made.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    assert made.choices[0].message.content.strip() == guest.text(ids, 6)


# -- where it runs


@feature("completions of the server")
def _completions(guest: Guest) -> None:
    prompt = guest.prompt(9)
    assert guest.complete(prompt).choices[0].text.strip() == guest.text(prompt, 6)


@feature("chats of the server")
def _chats(guest: Guest) -> None:
    said = guest.ask(max_tokens=6)
    assert said.choices[0].message.content.strip() == guest.text(guest.chat_ids(), 6)


@feature("sessions")
def _sessions(guest: Guest) -> None:
    session = fm.LanguageModelSession(model=fm.SystemLanguageModel(model=guest.loaded))
    options = fm.GenerationOptions(maximum_response_tokens=6)
    said = asyncio.run(session.respond(QUESTION["content"], options=options))
    assert said.strip() == guest.text(guest.chat_ids(), 6)


@feature("chat in the terminal")
def _chat(guest: Guest) -> None:
    said = _command("chat", "--model", guest.folder, "-m", 6, stdin=f"{QUESTION['content']}\n")
    assert said.strip() == guest.text(guest.chat_ids(), 6)


def _command(*argv: object, stdin: str = "") -> str:
    """Run a command; return its output, or raise `RefusedError` with the line that says what was wrong."""
    output, errors = io.StringIO(), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with redirect_stdout(output), redirect_stderr(errors), mock.patch.object(sys, "stdin", typed):
        status = main([str(word) for word in argv])
    if status == 2:
        raise RefusedError(errors.getvalue().removeprefix("afm-mlx: error: ").strip())
    assert status == 0, errors.getvalue()
    return output.getvalue()


# -- what answers look like


@feature("answers under a schema")
def _schema(guest: Guest) -> None:
    if guest.has_chats:
        asked = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        made = guest.ask(response_format=asked, extra_body={"enable_thinking": False})
        text = made.choices[0].message.content
    else:
        text = guest.complete(guest.prompt(9), 99, guided_json=CITY).choices[0].text
    jsonschema.validate(json.loads(text), CITY)


@feature("tool calls")
def _tool_calls(guest: Guest) -> None:
    with guest.following(CALLS.get(guest.family or "", _AFM_CALL)):
        message = guest.ask(tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Faro"},
    )
    history = [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain at 7"},
    ]
    with guest.following(_BEHIND_RESULTS.get(guest.family or "", "") + "It rains."):
        said = guest.ask(*history, tools=TOOLS).choices[0].message
    assert (said.content.strip(), said.tool_calls) == ("It rains.", None)
    with guest.server.http() as http:
        ids = http.post("/tokenize", json={"messages": [QUESTION, *history]}).json()["tokens"]
    shown = guest.stock[1].decode(ids)
    assert shown.index("weather") < shown.index("rain at 7")


@feature("required tool calls")
def _required(guest: Guest) -> None:
    off = {"enable_thinking": False}
    said = guest.ask(tools=TOOLS, tool_choice="required", extra_body=off, parallel_tool_calls=False)
    (call,) = said.choices[0].message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)


@feature("thoughts")
def _thoughts(guest: Guest) -> None:
    if guest.family not in THOUGHTS:
        _command("generate", "--model", guest.folder, "hm", "--think", "-m", 1)
        raise AssertionError("it takes --think")
    begin, end = THOUGHTS[guest.family]
    with guest.following(f"{begin}Hm. So.{end}It is fine."):
        said = guest.ask().choices[0].message
    assert (said.reasoning_content, said.content) == ("Hm. So.", "It is fine.")


# -- folders


@feature("4 bits in mlx-lm's format")
def _four_bits(guest: Guest) -> None:
    options = {"quantize": True, "q_bits": 4, "q_group_size": 32, "q_mode": "affine"}
    folder = convert(guest.floats, guest.place / "4-bit", to="mlx-lm", **options)
    _assert_same_logits(guest, load(folder)[0], mlx_lm.load(str(folder))[0])


@feature("2 bits in balanced packing")
def _two_bits(guest: Guest) -> None:
    packed, floats = _packed(guest), guest.place / "2-bit-floats"
    convert(packed, floats, dequantize=True)
    _assert_same_logits(guest, load(packed)[0], mlx_lm.load(str(floats))[0])
    sizes = [sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (packed, floats)]
    assert 32 * sizes[0] / sizes[1] < 8, (
        "bits per weight of small matrices, with scales and embedding"
    )


def _packed(guest: Guest) -> Path:
    folder = guest.place / "2-bit"
    if not folder.exists():
        convert(guest.floats, folder, quantize=True, q_mode="balanced")
    return folder


def _assert_same_logits(guest: Guest, ours: Any, stock: Any) -> Any:
    """Compare without the roundings of fast kernels; return the logits."""
    tokens = mx.array([guest.prompt(9)])
    with dispatch.force("reference"):
        logits = ours(tokens)
    assert_close(logits, stock(tokens), 2e-3)
    return logits


@feature("folders for stock mlx-lm")
def _folders(guest: Guest) -> None:
    if guest.is_packed:  # the folder that all other cells are compared with
        _assert_same_logits(guest, *(pair[0] for pair in (guest.loaded, guest.stock)))
        return
    folder = convert(guest.folder, guest.place / "half", dtype="bfloat16")
    stock = mlx_lm.load(str(folder))[0]
    stock.set_dtype(mx.float32)
    _assert_same_logits(guest, load(folder)[0], stock)


@feature("Core ML package")
def _core_ml(guest: Guest) -> None:
    package = guest.place / "tiny.mlpackage"
    convert(guest.folder, package, to="coreml", dtype="float32", prompt_lengths=(4,))
    assert list(package.glob("Data/*/*.mlmodel"))


@feature("Core AI bundle")
def _core_ai(guest: Guest) -> None:
    path = guest.place / "bundle"
    convert(guest.folder, path, to="coreai", dtype="float32", prompt_lengths=(4,), context=16)
    prompt = guest.prompt(6)
    wanted = np.array(guest.stock[0](mx.array([prompt]))[0, -1].astype(mx.float32))
    assert_close(CoreAIModel(path).logits(prompt), wanted, 2e-3)


# -- training


def _recipe(guest: Guest, model: Path, **options: Any) -> Recipe:
    data = guest.place / "train.jsonl"
    data.write_text(json.dumps({"text": "some words, and more of them"}) + "\n")
    one_step = TrainingOptions(1, 0.3, save_every=1, steps_per_eval=1)
    return Recipe(data, one_step, model, batch_size=1, max_seq_length=32, **options)


def _lora(guest: Guest, name: str, model: Path, **options: Any) -> Path:
    """Train an adapter for one step, of layers that stock mlx-lm can adapt."""
    keys = ("self_attn.out_proj", "mlp.down_proj") if guest.kind == "afm7" else None
    method = LoRATraining(rank=4, keys=keys, save_dtype="float32")
    train_lora(_recipe(guest, model, **options), guest.place / name, method)
    return guest.place / name


def _for_stock(guest: Guest, path: Path) -> Path:
    """An adapter as stock mlx-lm reads it: pairs of a stack's matrices are one tensor there."""
    if guest.kind != TRACK_MODEL:
        return path
    stacks: dict[str, list[mx.array]] = {}
    tensors = mx.load(str(path / "adapters.safetensors"))
    for name in sorted(tensors, key=lambda name: int(name.rpartition(".")[2])):
        stacks.setdefault(name.rpartition(".")[0], []).append(tensors[name].T)
    folder = path.with_name(f"{path.name}-stock")
    folder.mkdir()
    shutil.copy(path / "adapter_config.json", folder)
    stacked = {name: mx.stack(matrices) for name, matrices in stacks.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), stacked)
    return folder


@feature("LoRA adapters, trained and swapped")
def _adapters(guest: Guest) -> None:
    path = _lora(guest, "adapter", guest.folder)
    floats = guest.folder
    if guest.is_packed:
        floats = convert(guest.folder, guest.place / "dequantized", dequantize=True)
    adapted = mlx_lm.load(str(floats), adapter_path=str(_for_stock(guest, path)))[0]
    prompt = guest.prompt(12)
    wanted = [guest.greedy(prompt, 8), guest.greedy(prompt, 8, adapted)]
    assert wanted[0] != wanted[1]
    plain = Request(prompt, 8, logprobs=False)
    other = Request(prompt, 8, logprobs=False, adapter="a")
    with AdapterPool(guest.loaded[0], base_folder=guest.folder) as pool:
        pool.register("a", path)
        assert guest.tokens(plain, other, adapters=pool) == wanted
        assert guest.tokens(other, plain, adapters=pool) == wanted[::-1]


@feature("recovery adapters")
def _recovery(guest: Guest) -> None:
    packed, floats = _packed(guest), guest.place / "recovery-floats"
    path = _lora(guest, "recovery", packed, teacher=guest.floats)
    convert(packed, floats, dequantize=True)
    adapted = mlx_lm.load(str(floats), adapter_path=str(_for_stock(guest, path)))[0]
    logits = _assert_same_logits(guest, load(packed, adapter_path=str(path))[0], adapted)
    assert error(logits, mlx_lm.load(str(floats))[0](mx.array([guest.prompt(9)]))) > 0.01


@feature("quantization-aware training")
def _qat(guest: Guest) -> None:
    trained, floats = guest.place / "qat", guest.place / "qat-floats"
    train_qat(_recipe(guest, guest.floats), trained)
    convert(trained, floats, dequantize=True)
    _assert_same_logits(guest, load(trained)[0], mlx_lm.load(str(floats))[0])


# -- measuring


@feature("perplexity")
def _perplexity(guest: Guest) -> None:
    pieces = [guest.prompt(9), guest.prompt(5)]
    scored = []
    for piece in pieces:
        found = wanted_logprobs(guest.stock[0], piece[:1], piece[1:])
        scored.append(found[np.arange(len(piece) - 1), piece[1:]])
    wanted = np.exp(-np.concatenate(scored).mean())
    assert abs(measure_perplexity(*guest.loaded, pieces).perplexity / wanted - 1) < 0.02


@feature("evaluation")
def _evaluation(guest: Guest) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "Faro"}}}
    forced = Example("a", [{**QUESTION, "response_format": format}], None, '"Faro"', "a:1", "json")
    free = Example("b", [QUESTION], None, "Faro", "a:2")
    found = evaluate(*guest.loaded, [forced, free], constrained=True)
    assert [answer.is_right for answer in found.answers] == [True, False]
    ids = guest.chat_ids(enable_thinking=False)
    wanted = guest.text(ids, 2 * len(guest.loaded[1].encode("Faro")) + 8)
    assert found.answers[1].answer.strip() == wanted


@feature("embeddings")
def _embeddings(guest: Guest) -> None:
    prompts = [guest.prompt(n) for n in (3, 40, 17)]
    for pooling in ("last", "mean"):
        asked = Embedding(pooling)
        rows = guest.responses(*(Request(prompt, 0, embedding=asked) for prompt in prompts))
        for prompt, (response,) in zip(prompts, rows, strict=True):
            states = hidden_states(guest.stock[0], mx.array([prompt])).astype(mx.float32)
            wanted = np.array(states[0, -1] if pooling == "last" else states[0].mean(axis=0))
            assert response.embedding @ wanted > 0.99 * np.linalg.norm(wanted)


# -- the table


def cells(name: str, features: Iterable[str] = FEATURES) -> Cells:
    """Run features on a new guest."""
    with TemporaryDirectory() as place, ExitStack() as stack:
        guest = Guest(name, Path(place), stack)
        return {name: cell(guest, FEATURES[name]) for name in features}


def cell(guest: Guest, run: Feature) -> str:
    """Run one feature; return `WORKS`, or the first sentence of its refusal."""
    try:
        with redirect_stderr(io.StringIO()):  # progress
            run(guest)
    except REFUSALS as refusal:
        body = getattr(refusal, "body", None)
        text = body["message"] if isinstance(body, dict) else str(refusal)
        for folder in (guest.folder, guest.floats):
            text = text.replace(str(folder), "MODEL")
        text = re.sub(rf"\b{guest.kind}\b", "TYPE", re.sub(r"\d+%", "N%", text))
        return re.split(r"(?<=\.)\s", text)[0]
    return WORKS


def table(columns: Mapping[str, Cells]) -> str:
    """Write a row for each feature, and the reasons under the table."""
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name in FEATURES:
        row = [column[name] for column in columns.values()]
        shown = [c if c == WORKS else f"no: {reasons.setdefault(c, len(reasons) + 1)}" for c in row]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in reasons.items())])


_BLOCK = re.compile(r"(<!-- features -->\n\n)(.*?)(\n\n<!-- end of features -->)", re.S)


def written_cells(page: str) -> dict[str, Cells]:
    """Read the table of a page: cells by architecture."""
    found = _BLOCK.search(page)
    assert found is not None, "docs/models.md has no table of features"
    rows, _, notes = found[2].partition("\n\n")
    reasons = dict(line.split(". ", 1) for line in notes.splitlines())
    head, _, *lines = [line.strip("| ").split(" | ") for line in rows.splitlines()]
    columns: dict[str, Cells] = {name: {} for name in head}
    for name, *row in lines:
        for architecture, text in zip(head, row, strict=True):
            reason = text.removeprefix("no: ")
            columns[architecture][name] = text if reason == text else reasons[reason]
    return columns


if __name__ == "__main__":
    made = table({name: cells(name) for name in ARCHITECTURES})
    page, count = _BLOCK.subn(lambda found: found[1] + made + found[3], PAGE.read_text())
    assert count == 1, "docs/models.md has no place for the table"
    PAGE.write_text(page)

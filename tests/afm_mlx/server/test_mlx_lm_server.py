"""mlx-lm's server and ours are sent the same 200 requests for each of four families: differences have classes.

Ours is held to what is right: to mlx-lm's own `generate_step` on the prompt that transformers renders, or to
the reply that the model is made to give. Where mlx-lm's server differs, docs/mlx-lm.md says in which way.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from transformers.convert_slow_tokenizer import bytes_to_unicode

from afm_mlx.server import answer_events
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.server_options import ServerOptions
from bench.server_process import free_port
from tests.tools.cases import until
from tests.tools.documents import ROOT
from tests.tools.model_scripts import FollowsMarker
from tests.tools.server import running_server
from tests.tools.server_requests import CHAT, REPLIES, Case, Draw, written
from tests.tools.zoo_chats import write_family_folder

TYPES = {"qwen3": "qwen3", "llama3": "llama", "gemma3": "gemma3_text", "harmony": "gpt_oss"}
COUNT = 200


# -- what a server says


@dataclass
class Said:
    """An answer in one form, whole or streamed; None for what is not known."""

    status: int = 200
    param: str | None = None
    text: str | None = ""
    thought: str | None = ""
    calls: list[list[str]] | None = field(default_factory=list)
    finish: str | None = None
    prompt: int | None = None
    completion: int | None = None
    logprobs: list[float] | None = None

    def differences(self, other: "Said") -> dict[str, tuple[Any, Any]]:
        """Return the attributes that both know and that differ."""
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return {n: (a, b) for n, (a, b) in pairs.items() if None not in (a, b) and not alike(a, b)}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, list) and a and isinstance(a[0], float):
        return len(a) == len(b) and bool(np.allclose(a, b, atol=2e-2))
    return bool(a == b)


def said(answered: Any) -> Said:
    """Read a server's response."""
    if answered.status_code != 200:
        error = answered.json()["error"]
        param = error["param"] if isinstance(error, dict) else ""
        return Said(answered.status_code, param, None, None, None)
    made, calls = Said(), dict[int, list[str]]()
    replies = (
        [answered.text]
        if answered.text[:1] == "{"
        else re.findall("^data: ({.*)", answered.text, re.M)
    )
    for reply in map(json.loads, replies):
        if usage := reply.get("usage"):
            made.prompt, made.completion = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in reply["choices"]:
            part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            made.text += part.get("content") or ""
            made.thought += part.get("reasoning_content") or part.get("reasoning") or ""
            for number, call in enumerate(part.get("tool_calls") or ()):
                known = calls.setdefault(call.get("index", number), ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            made.finish = choice["finish_reason"] or made.finish
            for token in (choice.get("logprobs") or {}).get("content") or ():
                made.logprobs = [*(made.logprobs or ()), token["logprob"]]
    made.calls = list(calls.values())
    return made


# -- what is right


class Oracle:
    """Answers by mlx-lm's model and loop, without a server."""

    def __init__(self, family: str, folder: Any, adapter: Any) -> None:
        self.family = family
        self.models = {False: load(str(folder)), True: load(str(folder), adapter_path=str(adapter))}
        self.stock = self.models[False][1]
        self.hf = self.stock._tokenizer

    def right(self, case: Case) -> Said:
        """Return what a right server says."""
        if case.status != 200:
            return Said(case.status, case.param, None, None, None)
        body, prompt = case.body, self.prompt(case)
        limit, stop = body["max_tokens"], body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if case.reply is not None:
            tokens = self.hf.encode(written(self.family, case.reply), add_special_tokens=False)
            end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
            tokens, logprobs = [*tokens, self.hf.eos_token_id][: end + 1][:limit], None
        else:
            tokens, logprobs = self.generated(case, prompt, limit)
        made = self.cut(case, tokens, stop, limit)
        made.prompt = len(prompt) if prompt else None
        if logprobs and body.get("logprobs") and not stop:
            made.logprobs = [p for t, p in zip(tokens, logprobs, strict=True) if t not in self.ends]
        return made

    @cached_property
    def ends(self) -> set[int]:
        return set(self.stock.eos_token_ids)

    def prompt(self, case: Case) -> list[int]:
        """Return the prompt's tokens as transformers renders them; none where it can't keep a name apart."""
        if "prompt" in case.body:
            return list(self.hf.encode(case.body["prompt"]))
        messages = json.loads(json.dumps(case.shown or case.body["messages"]))
        for call in [c for m in messages for c in m.get("tool_calls") or ()]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        for message in messages:
            message["content"] = message["content"] or ""
        if case.kind == "a control token":
            return []
        continues = messages[-1]["role"] == "assistant"
        variables = {"enable_thinking": True, **case.body.get("chat_template_kwargs", {})}
        return list(
            self.hf.apply_chat_template(
                messages, tools=case.body.get("tools"), return_dict=False, **variables,
                add_generation_prompt=not continues, continue_final_message=continues,
            )
        )  # fmt: skip

    def generated(self, case: Case, prompt: list[int], limit: int) -> tuple[list[int], list[float]]:
        """Return the most likely tokens under the body's biases and penalties, and their log-probabilities."""
        tokens: list[int] = []
        chosen: list[float] = []
        if not prompt:
            return tokens, chosen
        body = case.body

        starts: list[int] = []  # generate_step shows the prompt's last tokens, and the answer's

        def adjusted(shown: mx.array, logits: mx.array) -> mx.array:
            starts.append(shown.shape[0])
            answer: list[int] = shown.tolist()[starts[0] :]
            row = np.array(logits[0], dtype=np.float32)
            for token, bias in body.get("logit_bias", {}).items():
                row[int(token)] += bias
            if penalty := body.get("repetition_penalty"):  # of the prompt and the answer
                seen = list({*prompt, *answer})
                row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
            for token, count in Counter(answer).items():
                row[token] -= body.get("frequency_penalty", 0) * count
                row[token] -= body.get("presence_penalty", 0)
            return mx.array(row)[None]

        model, _ = self.models[case.adapter]
        steps = generate_step(
            mx.array(prompt), model, max_tokens=limit, logits_processors=[adjusted]
        )
        for token, logprobs in steps:
            tokens.append(int(token))
            chosen.append(logprobs[int(token)].item())
            if tokens[-1] in self.ends:
                break
        return tokens, chosen

    def cut(self, case: Case, tokens: list[int], stop: list[str], limit: int) -> Said:
        """Return what is said with these tokens, up to the first stop string in the answer's text."""
        if not tokens:
            return Said(text=None, thought=None, calls=None)
        sizes = range(1, len(tokens) + 1) if stop else [len(tokens)]
        for size in sizes:
            thought, text, calls = self.split(case, tokens[:size])
            found = [text.find(each) for each in stop if each in (text or "")]
            if found:
                return Said(
                    text=text[: min(found)],
                    thought=thought,
                    calls=[],
                    finish="stop",
                    completion=size,
                )
        has_end = tokens[-1] in self.ends
        finish = ("tool_calls" if calls else "stop") if has_end else "length"
        # A grammar that leaves no choice but the end does not draw it.
        size = len(tokens) - bool(calls and self.family != "qwen3")
        return Said(200, None, text, thought, calls, finish, completion=size)

    def split(
        self, case: Case, tokens: list[int]
    ) -> tuple[str | None, str | None, list[list[str]] | None]:
        """Split an answer into thought, text and calls; None for text and calls if a call is cut off."""
        whole = self.decoded([t for t in tokens if t not in self.ends])
        thought, text = "", whole
        is_free = case.path == CHAT and case.reply is None and case.kind != "an answer at the end"
        if is_free and self.family != "gemma3":
            text = text.removeprefix(" ")  # as mlx-lm's detokenizers of byte-level vocabularies do
        if self.family == "qwen3":
            if "<think>" in whole and "prompt" not in case.body:
                before, _, rest = whole.partition("<think>")
                thought, _, text = rest.partition("</think>")
                thought, text = thought.strip("\n"), before + text.lstrip("\n")
        elif self.family == "harmony" and "prompt" not in case.body:
            messages = whole.split("<|start|>assistant")
            bodies = [m.removesuffix("<|end|>").partition("<|message|>") for m in messages]
            thought = "".join(b for head, _, b in bodies if "analysis" in head)
            text = "".join(b for head, _, b in bodies if "final" in head)
        if case.reply is None or not (case.reply.calls and case.body.get("tools")):
            return thought, text, []
        if tokens[-1] not in self.ends:
            return thought, None, None
        calls = [[name, json.dumps(given, ensure_ascii=False)] for name, given in case.reply.calls]
        between = "\n" if case.reply.text and self.family == "qwen3" else ""
        return thought, case.reply.text + between, calls

    def decoded(self, tokens: list[int]) -> str:
        """Return the text of tokens, in which a broken character is one U+FFFD."""
        names = self.hf.convert_ids_to_tokens(tokens)
        if self.family == "gemma3":
            parts = [
                bytes([int(n[3:5], 16)])
                if re.fullmatch("<0x..>", n)
                else n.replace("▁", " ").encode()
                for n in names
            ]
        else:
            values = {letter: value for value, letter in bytes_to_unicode().items()}
            values["Ā"] = None  # the byte 0, which mlx-lm's detokenizer leaves as it is
            parts = [
                bytes(values[c] for c in n)
                if all(values.get(c) is not None for c in n)
                else n.encode()
                for n in names
            ]
        return b"".join(parts).decode("utf-8", "replace")


# -- differences

Applies = Callable[[str, Case, Any, Any], bool]
"""True for a family, a case, and what mlx-lm's server and ours say."""


def has(*names: str) -> Applies:
    return lambda family, case, theirs, ours: any(case.body.get(name) for name in names)


def is_kind(*names: str) -> Applies:
    return lambda family, case, theirs, ours: case.kind in names


CLASSES: list[tuple[str, str, Applies]] = [
    ("a wrong input is answered, or is a 404 with Python's own error", "status",
     lambda family, case, theirs, ours: case.status != 200),
    ('errors are `{"error": "..."}`', "param", lambda family, case, theirs, ours: theirs == ""),
    ("GPT-OSS's channels, with thoughts and calls, are text", "text thought calls finish completion",
     lambda family, case, theirs, ours: family == "harmony" and case.path == CHAT),
    ("Llama 3's calls are text", "text calls finish completion",
     lambda family, case, theirs, ours: family == "llama3" and bool(case.reply and case.reply.calls)),
    ("a stop string that begins within a token is removed, and the text continues",
     "text thought calls finish completion", has("stop")),
    ("penalties look at the last 20 tokens, of the prompt and the answer",
     "text finish completion", has("repetition_penalty", "presence_penalty", "frequency_penalty")),
    ("streams have no log-probabilities; others include marks and the end, and `top_logprobs` changes which "
     "token they are for", "logprobs", has("logprobs")),
    ("the line breaks around a thought belong to it, and to the answer", "text thought",
     lambda family, case, theirs, ours: theirs.strip("\n") == ours.strip("\n")),
    ("the space that a completion begins with is lost", "text",
     lambda family, case, theirs, ours: f" {theirs}" == ours),
    ("`developer` and late instructions go to templates that drop them or raise",
     "status text prompt finish completion", is_kind("developer", "two systems", "late system")),
    ("an answer at the end is answered", "text prompt finish completion", is_kind("an answer at the end")),
    ("the name of a control token in a message is that token", "text prompt finish completion",
     is_kind("a control token")),
]  # fmt: skip
"""Text of docs/mlx-lm.md, attributes that differ, and when."""


# -- the servers


def write_adapter(folder: Any, model_folder: Any) -> None:
    """Write an adapter of mlx-lm, with random numbers."""
    settings = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {
            "rank": 4,
            "scale": 8.0,
            "dropout": 0.0,
            "keys": ["self_attn.q_proj", "self_attn.v_proj"],
        },
    }
    model, _ = load(str(model_folder))
    model.freeze()
    linear_to_lora_layers(model, 2, settings["lora_parameters"])
    # Numbers of float16, as our server keeps them.
    model.update(
        tree_map(
            lambda a: (mx.random.normal(a.shape) * 0.3).astype(mx.float16),
            model.trainable_parameters(),
        )
    )
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def is_up(client: Any) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("family", TYPES)
def test_every_difference_is_known_and_ours_is_right(family, tmp_path, rng, monkeypatch):
    folder = write_family_folder(
        tmp_path / "model", family, TYPES[family], max_position_embeddings=4096
    )
    write_adapter(tmp_path / "adapter", folder)
    scripts = [written(family, reply) or "" for reply in REPLIES]
    (tmp_path / "scripts.json").write_text(json.dumps(scripts))
    original = answer_events.logits_processors

    def processors(served, request, prompt):
        return [
            FollowsMarker(served.tokenizer, scripts, prompt),
            *original(served, request, prompt),
        ]

    monkeypatch.setattr(answer_events, "logits_processors", processors)
    oracle = Oracle(family, folder, tmp_path / "adapter")
    served = ServedModel.load(
        folder, adapters={"own": tmp_path / "adapter"}, options=ServerOptions(kv="float")
    )
    port = free_port()
    command = [
        sys.executable, "-m", "tests.tools.mlx_lm_server", str(tmp_path / "scripts.json"),
        "--model", str(folder), "--port", str(port),
    ]  # fmt: skip
    found, wrong, unknown = Counter(), [], []
    with (
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stderr=subprocess.DEVNULL
        ) as stock,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as theirs,
        running_server(served) as server,
        server.http() as http,
    ):
        try:
            until(lambda: is_up(theirs), 240)
            for number, case in enumerate(Draw(rng, family).cases(COUNT)):
                # mlx-lm's server ignores `adapters` for its `default_model`.
                own = {"model": str(folder), "adapters": str(tmp_path / "adapter")}
                own = own if case.adapter else {}
                a = said(theirs.post(case.path, json=case.body | own))
                named = "model:own" if case.adapter else "model"
                own = {"model": named} if case.body["model"] == "default_model" else {}
                b = said(http.post(case.path, json=case.body | own))
                if diff := oracle.right(case).differences(b):
                    wrong.append((number, case, diff))
                for name, (left, right) in a.differences(b).items():
                    fitting = (
                        text
                        for text, names, applies in CLASSES
                        if name in names.split() and applies(family, case, left, right)
                    )
                    if (text := next(fitting, None)) is None:
                        unknown.append((number, case, name, left, right))
                    found[text] += 1
        finally:
            stock.terminate()
    served.close()
    print(*found.most_common(), sep="\n")
    assert not wrong, "\n".join(map(str, wrong))
    assert not unknown, "\n".join(map(str, unknown))
    assert len(found) > 3


def test_the_document_has_every_class():
    page = (ROOT / "docs" / "mlx-lm.md").read_text()
    for text, _, _ in CLASSES:
        assert f"| {text} |" in page

"""A small model of each architecture: its folder, stock mlx-lm on it, and a server that follows a text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm
import numpy as np
import openai
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.converters.convert import convert
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request, TokenResponse
from afm_mlx.loading.load import load
from afm_mlx.loading.mlx_lm_models import register_models
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server import answer_events
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL
from afm_mlx.track_config import TrackConfig
from tests.tools.engines import run
from tests.tools.model_scripts import FollowsText
from tests.tools.models import random_config, random_model
from tests.tools.server import RunningServer, running_server
from tests.tools.tracks import random_tracks, write_tracks_folder
from tests.tools.zoo_chats import write_family_folder

ARCHITECTURES: dict[str, tuple[str, str | None]] = {
    "AFM": ("afm7", None),
    "AFM, packed": ("afm7", None),
    "Llama 3.2": ("llama", "llama3"),
    "Qwen3": ("qwen3", "qwen3"),
    "Qwen3-MoE": ("qwen3_moe", "qwen3"),
    "Gemma 3": ("gemma3_text", "gemma3"),
    "Gemma 4": ("gemma4", "gemma4"),
    "Mistral": ("mistral", "mistral"),
    "Phi-3": ("phi3", "phi3"),
    "GPT-OSS": ("gpt_oss", "harmony"),
    "LFM2": ("lfm2", "lfm2"),
    "Falcon-H1": ("falcon_h1", "falcon h1"),
    "Mamba 2": ("mamba2", None),
    "PT-MoE": (TRACK_MODEL, None),
}
"""The `model_type`, and the family of tokenizer and template; None for afm-nano's, or without a template."""
QUESTION = {"role": "user", "content": "How is it in Porto?"}
_SIZES = {
    "vocab_size": 4096,
    "hidden_dim": 32,
    "num_layers": 3,
    "num_kv_reuse_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 2.0,
    "kv_bits": 8,
    "context_length": 1024,
}
_TRACKS = TrackConfig(
    vocab_size=4096,
    num_tracks=2,
    num_layers_per_track=4,
    num_layers_per_track_per_sync_point=2,
    hidden_dim=64,
    attention_hidden_dim=32,
    dense_feed_forward_hidden_dim=64,
    sparse_feed_forward_hidden_dim=32,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    rope_theta=10000.0,
    local_attention_window_size=23,
)


@dataclass
class Guest:
    """A model folder `MODEL` with random weights in a folder, and ways to run it here and in stock mlx-lm.

    Control tokens, and tokens that are not plain text, are hardly ever the likeliest.
    """

    name: str
    place: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.kind, self.family = ARCHITECTURES[self.name]
        self.folder = self.floats = self.stock_folder = self.place / "MODEL"
        if self.is_packed:
            self.floats = self.place / "floats"
        if self.kind == "afm7":
            _write_afm(self.floats)
        elif self.kind == TRACK_MODEL:
            register_models()  # stock mlx-lm runs our definition of the architecture
            write_tracks_folder(self.folder, random_tracks(_TRACKS, 0), eos_token_id=[4, 2])
            _copy_tokenizer(self.folder)
        elif (
            self.kind == "mamba2"
        ):  # the original models have a byte-level tokenizer, and no template
            write_family_folder(self.folder, "qwen3", self.kind)
            (self.folder / "chat_template.jinja").unlink()
        else:
            assert self.family is not None
            write_family_folder(self.folder, self.family, self.kind, max_position_embeddings=4096)
        _prefer_plain_text(self.floats)
        if self.is_packed:
            convert(self.floats, self.folder, quantize=True)
            self.stock_folder = convert(self.folder, self.place / "stock", to="mlx-lm")

    @property
    def is_packed(self) -> bool:
        return self.name == "AFM, packed"

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        return load(self.folder)

    @cached_property
    def stock(self) -> tuple[Any, Any]:
        return mlx_lm.load(str(self.stock_folder))

    @property
    def has_chats(self) -> bool:
        """True if the folder has a chat template."""
        return (self.folder / "chat_template.jinja").exists()

    @property
    def vocab_size(self) -> int:
        size: int = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        return size

    # -- tokens

    def prompt(self, length: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(length).integers(60, 600, length).tolist()
        return tokens

    def greedy(self, prompt: Sequence[int], count: int, model: Any = None) -> list[int]:
        """The likeliest next tokens of stock mlx-lm's own loop."""
        model = self.stock[0] if model is None else model
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]

    def responses(
        self, *requests: Request, model: Any = None, **options: Any
    ) -> list[list[TokenResponse]]:
        """The engine's responses to requests in one batch."""
        engine = Engine(self.loaded[0] if model is None else model, self.loaded[1], **options)
        rows = [engine.submit(request) for request in requests]
        found = run(engine)
        for row in rows:
            if found[row][-1].error is not None:
                raise found[row][-1].error
        return [found[row] for row in rows]

    def tokens(self, *requests: Request, **options: Any) -> list[list[int]]:
        return [[r.token for r in row] for row in self.responses(*requests, **options)]

    def chat_ids(self, *more: dict[str, Any], **variables: Any) -> list[int]:
        """Stock mlx-lm's ids of a chat that begins with the question."""
        ids: list[int] = self.stock[1].apply_chat_template(
            [QUESTION, *more], add_generation_prompt=True, **variables
        )
        return ids

    def text(self, prompt: Sequence[int], count: int) -> str:
        """The text of stock mlx-lm's likeliest answer."""
        said: str = self.stock[1].decode(self.greedy(prompt, count))
        return said.strip()

    # -- the server

    @cached_property
    def server(self) -> RunningServer:
        return self.stack.enter_context(running_server(source=self.folder, kv="float"))

    @cached_property
    def client(self) -> openai.OpenAI:
        """OpenAI's client; making one takes longer than a small answer."""
        return self.server.openai()

    def ask(self, *more: dict[str, Any], **fields: Any) -> Any:
        """The server's completion of a chat that begins with the question."""
        fields = {"max_tokens": 200, "messages": [QUESTION, *more], **fields}
        return self.client.chat.completions.create(model="MODEL", **fields)

    def complete(self, prompt: Sequence[int], max_tokens: int = 6, **fields: Any) -> Any:
        """The server's completion of a prompt."""
        return self.client.completions.create(
            model="MODEL", prompt=list(prompt), max_tokens=max_tokens, extra_body=fields
        )

    @contextmanager
    def following(self, text: str) -> Iterator[None]:
        """Make the server's answers a text, in which names of control tokens are these."""
        original = answer_events.logits_processors

        def processors(served: Any, request: Any, prompt: Sequence[int]) -> list[Any]:
            script = FollowsText(served.tokenizer, text, len(prompt))
            return [script, *original(served, request, prompt)]

        with mock.patch.object(answer_events, "logits_processors", processors):
            yield


def _write_afm(folder: Path) -> None:
    """Write a small AFM model with afm-nano's tokenizer."""
    rng = np.random.default_rng(0)
    config = random_config(rng, **_SIZES)
    folder.mkdir()
    values = {**config.to_dict(), "eos_token_id": [4, 2]}
    (folder / "config.json").write_text(json.dumps(values))
    _copy_tokenizer(folder)
    save_weights(folder, dict(tree_flatten(random_model(config, rng).parameters())))


def _copy_tokenizer(folder: Path) -> None:
    """Copy afm-nano's tokenizer and template."""
    for path in resolve_model("afm-nano").iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)


def _prefer_plain_text(folder: Path) -> None:
    """Make the logits of control tokens, and of tokens that are not plain text, small."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    plain = re.compile(r"[Ġ▁]?[!-~]+")
    unlikely = {*added.values()} | {
        token
        for name, token in vocabulary.items()
        if not plain.fullmatch(name) or re.fullmatch("<.*>", name)
    }
    (file,) = folder.glob("*.safetensors")
    weights = mx.load(str(file))
    heads = ("lm_head.weight", "embed_tokens.weight", "embeddings.weight", "embedding.weight")
    head = next(name for end in heads for name in weights if name.endswith(end))
    weights[head][mx.array(sorted(unlikely))] *= 0.02
    mx.save_safetensors(str(file), weights, {"format": "mlx"})

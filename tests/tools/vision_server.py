"""The real server with a tiny random model that sees, and pictures in the forms that requests have."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from PIL import Image

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.engine.request import Request
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.tokenizer.tokenizer import save_tokenizer
from afm_mlx.vision.prompt_image import PromptImage
from tests.tools.models import random_config, random_model
from tests.tools.server import RunningServer, running_server
from tests.tools.vision import with_images

MODEL = "seeing"
IMAGE_TOKEN = 4096


def write_seeing_folder(folder: Path, context: int = 2048, **vision: Any) -> Path:
    """Write a tiny AFM model with random weights, an image encoder and the tokenizer of afm-nano."""
    rng = np.random.default_rng(0)
    config = random_config(
        rng,
        vocab_size=4097,
        hidden_dim=16,
        num_layers=2,
        num_kv_reuse_layers=1,
        num_heads=2,
        num_kv_heads=1,
        context_length=context,
    )
    config = with_images(config, image_token_id=IMAGE_TOKEN, **vision)
    folder.mkdir()
    save_weights(folder, dict(tree_flatten(random_model(config, rng).parameters())))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_tokenizer(resolve_model("afm-nano"), folder)
    return folder


@dataclass
class SeeingServer:
    """A running server, and what its engine was sent."""

    server: RunningServer
    requests: list[Request] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The ids of the last prompt."""
        return list(self.requests[-1].prompt)

    @property
    def images(self) -> list[PromptImage]:
        """The images of the last prompt."""
        return list(self.requests[-1].images)


@contextmanager
def seeing_server(context: int = 2048, **settings: Any) -> Iterator[SeeingServer]:
    """Start a server of a model that sees; `settings` are fields of `ServerOptions`."""
    with TemporaryDirectory() as folder:
        source = write_seeing_folder(Path(folder) / MODEL, context)
        with running_server(source=source, **settings) as server:
            seeing = SeeingServer(server)
            stream = server.served.engine.stream

            def kept(request: Request) -> Any:
                seeing.requests.append(request)
                return stream(request)

            server.served.engine.stream = kept  # type: ignore[method-assign]
            yield seeing


def square(colour: tuple[int, ...] = (200, 30, 30), size: int = 40, format: str = "PNG") -> bytes:
    """The file of a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, format)
    return file.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{in_base64(content)}"

"""Run Apple's on-device foundation-model architecture (AFM) locally, with MLX.

The public names are imported on first use, so `import afm_mlx` is cheap. On Linux, import `afm_mlx` before
`mlx.core`, to give MLX a fast matrix product (`afm_mlx.blas`).
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx import blas

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__version__ = "0.1.0"

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.engine.embedding import embed
    from afm_mlx.engine.generation import (
        batch_generate,
        generate,
        generate_as,
        stream_generate,
        stream_generate_as,
        stream_generate_async,
    )
    from afm_mlx.engine.samplers import make_logits_processors, make_sampler
    from afm_mlx.engine.search import search
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.guidance.types import answer_type
    from afm_mlx.loading.load import load
    from afm_mlx.tokenizer.chat_images import ChatImages
    from afm_mlx.vision.prompt_image import read_image

__all__ = [
    "AdapterPool",
    "ChatImages",
    "Constraint",
    "__version__",
    "answer_type",
    "batch_generate",
    "embed",
    "generate",
    "generate_as",
    "load",
    "make_logits_processors",
    "make_sampler",
    "read_image",
    "search",
    "stream_generate",
    "stream_generate_as",
    "stream_generate_async",
]

_HOME = {
    "AdapterPool": "adapters.pool",
    "ChatImages": "tokenizer.chat_images",
    "Constraint": "guidance.constraint",
    "answer_type": "guidance.types",
    "batch_generate": "engine.generation",
    "embed": "engine.embedding",
    "generate": "engine.generation",
    "generate_as": "engine.generation",
    "load": "loading.load",
    "make_logits_processors": "engine.samplers",
    "make_sampler": "engine.samplers",
    "read_image": "vision.prompt_image",
    "search": "engine.search",
    "stream_generate": "engine.generation",
    "stream_generate_as": "engine.generation",
    "stream_generate_async": "engine.generation",
}


class CheckoutFinder:
    """Find `afm_mlx.kernels` and its like in a source checkout, where they are next to this folder, not in it.

    Python started at the checkout's root imports this very file, whether the package is installed or not.
    """

    rooms = ("kernels", "converters", "adapters")
    root = Path(__file__).resolve().parent.parent

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package that is next to this folder; None for any other module."""
        package, _, room = name.rpartition(".")
        if package != __name__ or room not in cls.rooms:
            return None
        return PathFinder.find_spec(name, [str(cls.root)], target)


if (CheckoutFinder.root / "pyproject.toml").is_file():
    # An editable install adds the root, where everything would be a part of this package, tests too.
    __path__[:] = [folder for folder in __path__ if folder != str(CheckoutFinder.root)]
    sys.meta_path.append(CheckoutFinder)

blas.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from afm_mlx import processor

    processor.check()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

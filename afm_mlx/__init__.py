"""Run Apple's on-device foundation-model architecture (AFM) locally, with MLX.

The names below are loaded when they are first used, so `import afm_mlx` costs next to nothing. On Linux,
import it before `mlx.core`: it then gives MLX a fast matrix product (`afm_mlx.blas`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx import blas

__version__ = "0.1.0"

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.engine.generation import (
        batch_generate,
        generate,
        generate_as,
        stream_generate,
        stream_generate_as,
        stream_generate_async,
    )
    from afm_mlx.engine.samplers import make_logits_processors, make_sampler
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.guidance.types import answer_type
    from afm_mlx.loading.load import load

__all__ = [
    "AdapterPool",
    "Constraint",
    "__version__",
    "answer_type",
    "batch_generate",
    "generate",
    "generate_as",
    "load",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
    "stream_generate_as",
    "stream_generate_async",
]

_HOME = {
    "AdapterPool": "adapters.pool",
    "Constraint": "guidance.constraint",
    "answer_type": "guidance.types",
    "batch_generate": "engine.generation",
    "generate": "engine.generation",
    "generate_as": "engine.generation",
    "load": "loading.load",
    "make_logits_processors": "engine.samplers",
    "make_sampler": "engine.samplers",
    "stream_generate": "engine.generation",
    "stream_generate_as": "engine.generation",
    "stream_generate_async": "engine.generation",
}

# In a source checkout the subpackages lie beside this folder instead of in it. Python started at the
# checkout's root imports this very file, installed package or not, and finds them here.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels" / "__init__.py").is_file():
    __path__.append(str(_root))

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

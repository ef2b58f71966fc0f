"""Masks that a model's predictor chooses for prompts, as adapters of a pool.

A mask follows from a conversation's first prompt alone, so it stays for the whole conversation. Masks are
adapters like others: read by the pool under its budget, and evicted where they have not been used for longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from afm_mlx.adapters.mask_predictor import MaskPredictor
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.task_mask import write_mask
from afm_mlx.tokenizer.first_prompt import first_prompt
from afm_mlx.tokenizer.protocol import Tokenizer

_REMEMBERED = 1024  # first prompts whose masks are known


class PromptMasks:
    """The names of masks in a pool, by prompts.

    Args:
        pool: serves the model that the predictor is for.
        predictor, tokenizer: the model's.
        base_model_fingerprint: fingerprint of the model, which the pool compares.
        adapter: path of an adapter that runs with every mask; None without one.
    """

    def __init__(
        self,
        pool: AdapterPool,
        predictor: MaskPredictor,
        tokenizer: Tokenizer,
        base_model_fingerprint: str | None = None,
        adapter: str | Path | None = None,
    ):
        self._pool, self._predictor, self._tokenizer = pool, predictor, tokenizer
        self._fingerprint, self._adapter = base_model_fingerprint, adapter
        self._folder = TemporaryDirectory(prefix="afm-mlx-masks-")
        self._names: dict[tuple[int, ...], str] = {}

    def name_for(self, prompt: Sequence[int]) -> str:
        """Return the registered name of the mask for a prompt's tokens; equal for prompts that continue it.

        A text without a chat's turns is its own first prompt. Raises `RequestError` for no tokens.
        """
        first = tuple(prompt[: first_prompt(prompt, self._tokenizer)])
        if (name := self._names.get(first)) is not None:
            return name
        mask = self._predictor.task_mask([first], "", self._fingerprint)
        name = f"mask {mask.fingerprint[:16]}"
        if name not in self._pool.registered:
            folder = Path(self._folder.name) / mask.fingerprint[:16]
            write_mask(folder, mask)
            if self._adapter is None:
                self._pool.register(name, folder)
            else:
                self._pool.register(name, self._adapter, mask=folder)
        if len(self._names) >= _REMEMBERED:
            del self._names[next(iter(self._names))]
        self._names[first] = name
        return name

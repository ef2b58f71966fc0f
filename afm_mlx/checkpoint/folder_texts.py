"""The text files of a converted folder: `config.json` and the model card, `README.md`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import MODEL_TYPE, ModelConfig
from afm_mlx.tokenizer.vocabulary import tokenizer_files, tokenizer_folder

_CARD = """\
---
library_name: mlx
pipeline_tag: text-generation
license: other
tags:
- mlx
- {model_type}
---

# {name}

{about}

```bash
afm-mlx generate --model {name} --prompt "Hello"
```
{adapters}
## Licence

{licence}
"""

_CONVERTED = """\
An AFM text v7 model in MLX format: {parameters:,} parameters in {kind}, and {layers} blocks, of which the
last {reuse} reuse keys and values. Converted from `{source}` by afm-mlx.{note}"""

_ADAPTERS = """
The adapters that the checkpoint held are folders of their own: {names}.
"""

_LICENCE_OF_CONVERTED = """\
Converting changes the format, not the terms. The weights stay under the licence of the checkpoint that they
came from: read it before you use them, and before you give this folder to anybody."""

_TRAINED = """\
{what} Trained from `{source}` by afm-mlx.

| training | |
| --- | --- |
{facts}"""

_LICENCE_OF_TRAINED = """\
Training changes numbers, not terms. The weights stay under the licence of the model that they came from, and
the data may have terms of its own: read both before you use this folder, and before you give it to anybody."""


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write `config.json` as mlx-lm does: sorted, indented by 4."""
    text = json.dumps(values, indent=4, sort_keys=True)
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_card(
    folder: Path,
    *,
    name: str,
    source: str,
    config: ModelConfig,
    dtype: mx.Dtype,
    quantization: Mapping[str, Any] | None = None,
    note: str = "",
    adapters: Sequence[str] = (),
) -> None:
    """Write the card, `README.md`, of a converted model.

    Args:
        name: the model's name.
        source: the checkpoint's bare name, without its folders.
        dtype: type of weights that are not packed.
        quantization: `quantization` of config.json, or None.
        note: a sentence on how layers were packed.
        adapters: names of the adapters in the folder.
    """
    kind = str(dtype).removeprefix("mlx.core.")
    if quantization:
        mode = quantization.get("mode", "affine")
        kind = f"{quantization['bits']}-bit codes ({mode}), what is not packed in {kind}"
        bits = 8 * sum(tensor.nbytes for tensor in stored_tensors(folder).values())
        note = f"A weight takes {bits / config.num_parameters:.3f} bits on average. {note}".rstrip()
    about = _CONVERTED.format(
        parameters=config.num_parameters,
        kind=kind,
        layers=config.num_layers,
        reuse=config.num_kv_reuse_layers,
        source=source,
        note=f"\n{note}" if note else "",
    )
    names = ", ".join(f"`adapters/{adapter}`" for adapter in adapters)
    held = _ADAPTERS.format(names=names) if adapters else ""
    _write_card(folder, name, MODEL_TYPE, about, _LICENCE_OF_CONVERTED, held)


def _write_card(
    folder: Path, name: str, model_type: str, about: str, licence: str, adapters: str = ""
) -> None:
    parts = {"about": about, "licence": licence, "adapters": adapters}
    text = _CARD.format(name=name, model_type=model_type, **parts)
    (folder / "README.md").write_text(text, encoding="utf-8")


# -- tokenizers


def copy_tokenizer_files(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer's files of a model folder, for a draft its target's; return the files' names."""
    files = tokenizer_files(tokenizer_folder(source))
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return [file.name for file in files]


def write_trained_card(
    folder: Path, *, name: str, source: str, model_type: str, what: str, facts: Mapping[str, str]
) -> None:
    """Write the card, `README.md`, of a trained model.

    Args:
        source: bare name of the model before training.
        model_type: `model_type` in the folder's config.json.
        what: a sentence that describes the weights.
        facts: figures of the run, by their labels.
    """
    rows = "\n".join(f"| {label} | {value} |" for label, value in facts.items())
    about = _TRAINED.format(what=what, source=source, facts=rows)
    _write_card(folder, name, model_type, about, _LICENCE_OF_TRAINED)

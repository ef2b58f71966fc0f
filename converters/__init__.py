"""Formats in and out: `convert` finds out what a source is and writes a model folder.

| source | file |
| --- | --- |
| a toolkit checkpoint: a folder with `base-model.pt`, or a `.pt` file with its config | `toolkit.py` |
| a model folder of mlx-lm's `afm7`, or one of ours | `mlx_lm.py` |
| any other model that mlx-lm knows, as a folder or a hub id | `zoo.py`, by mlx-lm |
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx

from afm_mlx.config import MODEL_TYPE
from afm_mlx.converters import mixed_bits, mlx_lm, toolkit, zoo
from afm_mlx.converters.output import write_config
from afm_mlx.converters.quantize import QuantizationWishes
from afm_mlx.converters.toolkit_config import is_toolkit_config, read_toolkit_config
from afm_mlx.converters.torch_file import check_archive
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.files import atomic_folder, refuse_existing
from afm_mlx.quantization import Predicate
from afm_mlx.tokenizer import load_tokenizer
from afm_mlx.weights import Progress

DTYPES: dict[str, mx.Dtype] = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
TARGETS = ("afm-mlx", "mlx-lm")


def convert(
    model: str | Path,
    mlx_path: str | Path,
    *,
    dtype: str | None = None,
    to: str = "afm-mlx",
    quantize: bool = False,
    q_bits: int | None = None,
    q_mode: str | None = None,
    q_group_size: int | None = None,
    q_granularity: str | None = None,
    q_embedding_bits: int | None = None,
    q_embedding_mode: str | None = None,
    q_embedding_granularity: str | None = None,
    quant_predicate: str | Predicate | None = None,
    target_bpw: float | None = None,
    data: str | Path | None = None,
    dequantize: bool = False,
    progress: Progress | None = None,
    measuring: Progress | None = None,
) -> Path:
    """Convert a checkpoint to a model folder.

    The folder is built beside its place and renamed when it is whole: a failure or an interrupt leaves
    nothing behind. The source is never written to.

    Args:
        model: a toolkit checkpoint, a model folder, or a hub id.
        mlx_path: the folder to make; it must not exist.
        dtype: "float16", "bfloat16" or "float32" for weights and adapters; None keeps the source's.
        to: "afm-mlx", or "mlx-lm" for a folder that stock mlx-lm reads and that holds nothing else.
        quantize: pack linear layers and embeddings. The other options say how, and are refused without it.
        q_bits: 2, 4 or 8; 2 for balanced weights by default, else 4.
        q_mode: "balanced", "affine" or "palette"; balanced for AFM models by default, affine for others,
            which take mlx-lm's own modes too.
        q_group_size: inputs that share a scale, or rows that share a palette's table.
        q_granularity: "tensor", "row" or "group"; see `QuantizationRule`.
        q_embedding_bits: of embeddings and heads; `q_bits`, and 4 at least, by default.
        q_embedding_mode, q_embedding_granularity: of embeddings and heads; those of the other layers by
            default.
        quant_predicate: a recipe's name (`converters.quantize.RECIPES`; mlx-lm's for other
            architectures), or a function of path and module, see `quantize_model`.
        target_bpw: bits that a weight of the folder takes on average, at most, scales and tables included.
            Layers get 2 or 4 bits, or what the recipe's name says, by what they suffer on text; see
            `sensitivity`. The model is read into memory for that, and the folder gets a `sensitivity.json`.
        data: the text: a `.jsonl` or `.txt` file, or a folder with `train.jsonl`; the model folder's
            `heldout.jsonl` by default.
        dequantize: write packed layers as the numbers that they stand for.
        progress: called with bytes written and bytes in all.
        measuring: called with passes over the text that are done, and passes in all.

    Returns:
        `mlx_path`.

    Raises:
        AFMError: when the source can't be read or can't become what was asked for; the message says why.
    """
    wishes = QuantizationWishes(
        quantize,
        q_bits,
        q_mode,
        q_group_size,
        q_granularity,
        q_embedding_bits,
        quant_predicate,
        dequantize,
        q_embedding_mode,
        q_embedding_granularity,
        target_bpw,
        data,
    )
    wishes.check()
    refuse_existing(mlx_path)
    if dtype is not None and dtype not in DTYPES:
        raise AFMError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}.")
    if to not in TARGETS:
        raise AFMError(f"The target format is {to!r}; allowed are {', '.join(TARGETS)}.")
    mlx_path = Path(mlx_path)
    source = Path(model) if os.path.exists(model) else _named(str(model))
    kind = detect(source)
    stock = to == "mlx-lm"
    try:
        if kind not in ("toolkit", MODEL_TYPE):
            with atomic_folder(mlx_path) as folder:
                zoo.write_zoo(source, folder, kind, dtype, wishes, measuring)
            return mlx_path
        mix = None
        if target_bpw is not None:
            mix = _mix_of(source, kind, mlx_path, dtype, stock, wishes, measuring)
            wishes = mix.wishes
        with atomic_folder(mlx_path) as folder:
            if kind == "toolkit":
                _write_toolkit(source, folder, mlx_path.name, dtype, stock, wishes, progress)
            else:
                mlx_lm.write_mlx_lm(
                    source,
                    folder,
                    name=mlx_path.name,
                    dtype=DTYPES.get(dtype or ""),
                    stock=stock,
                    rules=wishes.afm_rules if quantize else None,
                    dequantize=dequantize,
                    progress=progress,
                )
            if mix is not None:
                mix.write(folder)
    except OSError as error:
        raise AFMError(
            f"Converting {model} to {mlx_path} failed: {error}. Check that the source can be read and that "
            "there is room and permission to write."
        ) from None
    return mlx_path


def _named(model: str) -> Path:
    # Only names need it, and it takes the whole runtime along.
    from afm_mlx.loading import resolve_model

    return resolve_model(model)


def detect(source: Path) -> str:
    """What a source is, by its content: "toolkit", or the `model_type` of a model folder.

    Raises:
        CheckpointError: when it is nothing that can be converted; says what was found.
    """
    if not source.is_dir():
        check_archive(source)
        return "toolkit"
    if any(source.glob("*.pt")):
        return "toolkit"
    config = source / "config.json"
    if not config.is_file():
        names = sorted(path.name for path in source.iterdir())
        found = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
        raise CheckpointError(
            f"{source} is no checkpoint: it holds {found}. Give a folder with base-model.pt and "
            "base-model-config.json, or a model folder with config.json and *.safetensors."
        )
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        kind = "" if is_toolkit_config(values) else values["model_type"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{config} does not say what model this is: {error or type(error).__name__}. A model folder's "
            'config.json has "model_type".'
        ) from None
    if not kind or not isinstance(kind, str):
        raise CheckpointError(
            f"{config} is a config of a toolkit checkpoint, whose .pt file is not beside it."
        )
    return kind


def _mix_of(
    source: Path,
    kind: str,
    mlx_path: Path,
    dtype: str | None,
    stock: bool,
    wishes: QuantizationWishes,
    progress: Progress | None,
) -> mixed_bits.Mix:
    data = mixed_bits.calibration_file(wishes, source)
    if stock:
        mixed_bits.check_stock(wishes, "balanced")
    if kind != "toolkit":
        return mixed_bits.mix_of_folder(source, wishes, data, DTYPES.get(dtype or ""), progress)
    mlx_path.parent.mkdir(parents=True, exist_ok=True)
    # Float weights lie beside the output for a while: only a folder can be read into a model.
    with tempfile.TemporaryDirectory(prefix=f".{mlx_path.name}-", dir=mlx_path.parent) as place:
        folder = convert(source, Path(place) / "float")
        return mixed_bits.mix_of_folder(folder, wishes, data, DTYPES.get(dtype or ""), progress)


def _write_toolkit(
    source: Path,
    folder: Path,
    name: str,
    dtype: str | None,
    stock: bool,
    wishes: QuantizationWishes,
    progress: Progress | None,
) -> None:
    files = toolkit.find_files(source)
    config = read_toolkit_config(files.config)
    if stock:
        mlx_lm.check_stock(config.model, files.weights)
    if wishes.dequantize:
        raise AFMError(f"{files.weights} holds float weights: there is nothing to dequantize.")
    rules = wishes.afm_rules(config.model) if wishes.quantize else None
    packed = toolkit.write_toolkit(
        files,
        config,
        folder,
        name=name,
        dtype=DTYPES.get(dtype or ""),
        with_adapters=not stock,
        rules=rules,
        stock=stock,
        progress=progress,
    )
    tokenizer = load_tokenizer(folder)
    # Stock mlx-lm would otherwise stop at the end of a turn only.
    ends = [tokenizer.eos_token_id, tokenizer.separator_id]
    values = config.model.to_dict() | {"eos_token_id": ends} | packed
    write_config(folder, mlx_lm.without_our_keys(values) if stock else values)

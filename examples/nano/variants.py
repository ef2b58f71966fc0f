"""The variants of the model that `quantize.py` makes: one command of `afm-mlx` each.

In a command, {checkpoint} is the folder of the trained checkpoint, {data} the folder of `write_data.py`, {out}
the command's output, and any other name in braces the folder of that variant.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

STAGES = ("ptq", "qat", "recover")

# One sample per row: attention then has fewer scores to exponentiate, which is slow on a CPU.
_BATCH = "--batch-size 16 --no-packing --max-seq-length 512 --val-batches 10 --seed 0"
_QAT = (
    "qat --model {float} --teacher {float} --distillation-weight 0.5 --data {data} --save-path {out} "
    "--bits 2 --embedding-bits 4 --iters 700 --learning-rate 1e-3 --warmup-iters 50 --ema-decay 0.99 "
    f"--steps-per-eval 200 --save-every 100 {_BATCH}"
)
_RECOVERY = (
    "lora --teacher {float} --data {data} --adapter-path {out} --rank 16 --scale 1.0 --iters 300 "
    f"--warmup-iters 25 --steps-per-eval 100 --save-every 100 {_BATCH}"
)
_PTQ = "convert --model {float} --mlx-path {out} -q"
# Half-precision scales are what MLX's own format has elsewhere; ours are float32, one per row or tensor.
_AFFINE = f"{_PTQ} --q-mode affine --q-group-size 64 --q-embedding-bits 4 --dtype float16"
_BALANCED = (
    f"{_PTQ} --q-mode balanced --q-bits 2 --q-embedding-bits 4 --q-embedding-granularity row"
)
# Tables per 16 rows, bits by sensitivity. Both targets count the embedding.
_PALETTE = (
    f"{_PTQ} --q-mode palette --q-embedding-mode balanced --q-embedding-granularity row "
    "--data {data}/valid.jsonl"
)


@dataclass(frozen=True)
class Variant:
    """One row of the comparison: a name of its folder, a label in tables, a stage of `STAGES` that makes it.

    `command` is described above. `base` is, of an adapter, the variant that it belongs to.
    """

    name: str
    label: str
    stage: str
    command: str
    base: str | None = None


VARIANTS = (
    Variant("float", "float", "ptq", "convert --model {checkpoint} --mlx-path {out}"),
    Variant("affine-4", "RTN, affine 4 bits per 64", "ptq", f"{_AFFINE} --q-bits 4"),
    # The scheme of the 2024 models, whose embedding has 8 bits per row.
    Variant(
        "palette-3.5",
        "palette, mixed to 3.5 bits",
        "ptq",
        f"{_PALETTE} --q-embedding-bits 8 --target-bpw 3.5",
    ),
    Variant(
        "palette-2.5",
        "palette, mixed to 2.5 bits",
        "ptq",
        f"{_PALETTE} --q-embedding-bits 4 --target-bpw 2.5",
    ),
    Variant("affine-2", "RTN, affine 2 bits per 64", "ptq", f"{_AFFINE} --q-bits 2"),
    Variant(
        "balanced-2-row", "RTN, balanced 2 bits per row", "ptq", f"{_BALANCED} --q-granularity row"
    ),
    Variant(
        "balanced-2-tensor",
        "RTN, balanced 2 bits per tensor",
        "ptq",
        f"{_BALANCED} --q-granularity tensor",
    ),
    Variant("qat-tensor", "QAT, 2 bits per tensor", "qat", f"{_QAT} --q-granularity tensor"),
    Variant("qat-row", "QAT, 2 bits per row", "qat", f"{_QAT} --q-granularity row"),
    Variant(
        "recovery-palette",
        "palette, 2.5 bits + adapter",
        "recover",
        f"{_RECOVERY} --learning-rate 5e-4 --distillation-weight 0.5 --model {{palette-2.5}}",
        base="palette-2.5",
    ),
    Variant(
        "recovery-row",
        "QAT per row + adapter",
        "recover",
        f"{_RECOVERY} --learning-rate 1e-3 --distillation-weight 1.0 --model {{qat-row}}",
        base="qat-row",
    ),
)


def arguments(variant: Variant, source: Path, data: Path) -> list[str]:
    """The arguments of `afm-mlx` that make a variant, `--resume` included where a run was interrupted."""
    places = {each.name: str(folder(each.name, source)) for each in VARIANTS}
    places |= {
        "checkpoint": str(source / "checkpoint"),
        "data": str(data),
        "out": str(folder(variant.name, source)),
    }
    argv = [_fill(word, places) for word in shlex.split(variant.command)]
    return [*argv, "--resume"] if was_interrupted(variant, source) else argv


def _fill(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(f"{{{name}}}", place)
    return word


def folder(name: str, source: Path) -> Path:
    """Where a variant is, or will be."""
    return source / "models" / name


def is_made(variant: Variant, source: Path) -> bool:
    """True if a variant is complete."""
    # The folder of an adapter holds its training run while that goes on.
    last = "adapters.safetensors" if variant.base else "config.json"
    return (folder(variant.name, source) / last).is_file()


def was_interrupted(variant: Variant, source: Path) -> bool:
    """True if a training run of the variant is interrupted."""
    place = folder(variant.name, source)
    runs = (place / "run", place.with_name(f"{variant.name}-run"))
    return variant.stage != "ptq" and any((run / "run.json").is_file() for run in runs)

"""The counts that `bench.predict` needs: `make costs` writes them from the kernels' text.

`python -m tests.metal.prediction_data` writes bench/prediction.json, and the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.config import PRESETS
from afm_mlx.kernels import mlx
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE, PRESET_RULES
from bench.apple_gpus import CHIPS, SHARES_PIPELINES, Launch
from bench.predict import (
    CONTEXTS,
    DATA,
    PROMPT_WAYS,
    TEXT_PRESETS,
    _data,
    facts,
    predict,
    prompt_facts,
)
from tests.tools.graph import decode_cost

from . import launches, published, zoo_steps
from .cost import count_launch
from .launches import Recorded

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
# Formats of MLX to compare with: mlx-lm quantizes in groups of 64, and 128 are the cheapest.
MLX_FORMATS = {
    f"{kind.removesuffix('_t')}, {group}": (kind, group)
    for kind in ("bfloat16_t", "half")
    for group in (64, 128)
}


_NORMED = ("qkv_proj", "gate_proj", "up_proj")  # layers behind a norm


class _Counted:
    """Launches without repetitions: each is counted, and stored, once."""

    def __init__(self) -> None:
        self.launches: dict[Launch, int] = {}
        self._known: dict[tuple, int] = {}

    def add(self, launch: Launch) -> int:
        frozen = launch._replace(operations=tuple(launch.operations.items()))
        return self.launches.setdefault(frozen, len(self.launches))

    def of(self, call: Recorded) -> int:
        if call.key not in self._known:
            self._known[call.key] = self.add(count_launch(*call))
        return self._known[call.key]

    def steps(self, calls: Iterable[Recorded]) -> list[list[int]]:
        """(how often, launch) of calls that wait for each other."""
        numbers = Counter(self.of(call) for call in calls)
        return [[count, number] for number, count in numbers.items()]


def collect() -> dict[str, Any]:
    counted = _Counted()
    presets = {name: _preset(name, counted) for name in TEXT_PRESETS}
    kernels = [[*launch[:3], dict(launch.operations), *launch[4:]] for launch in counted.launches]
    return {"launches": kernels, "presets": presets, "errors": published.errors()}


def _preset(name: str, counted: _Counted) -> dict[str, Any]:
    model = launches.shapes_only(
        PRESETS[name], *PRESET_RULES.get(name, (AFM_RULE, AFM_EMBEDDING_RULE))
    )
    steps = {str(context): _step(model, context, counted) for context in CONTEXTS}
    formats = {name: _of_mlx(model, counted, *each) for name, each in MLX_FORMATS.items()}
    mlx = formats if all(formats.values()) else {}
    return {"steps": steps, "blocks": _writing_blocks(model), "mlx": mlx}


def _writing_blocks(model: Model) -> list[list[Any]]:
    """(how often, (N, K, bits, halves) of the matrices, width of queries) of the blocks that a prompt runs.

    `halves` is true if a prompt's vectors are float16 on a GPU without bfloat16: behind a norm, for a grid.
    """
    config = model.args
    blocks = Counter(
        tuple(
            (
                layer.packed.out_dims,
                layer.packed.in_dims,
                layer.packed.bits,
                mlx.is_grid(layer.packed) and path.endswith(_NORMED),
            )
            for path, layer in block.named_modules()
            if isinstance(layer, PackedLinear)
        )
        for block in model.model.layers
    )
    return [
        [count, list(map(list, each)), config.num_heads * config.head_dim]
        for each, count in blocks.items()
    ]


def _step(model: Model, context: int, counted: _Counted) -> dict[str, Any]:
    """A token with `context` tokens in the cache, its own included."""
    calls = launches.decode_step(model, context - 1)
    tokens, cache = mx.zeros((1, 1), mx.int32), launches.cache_of(model, context - 1, context)
    dispatches = decode_cost(model, Model.greedy, tokens, cache).dispatches
    config = model.args
    width = 1 if config.kv_bits == 8 else 2
    kv = config.num_layers * 2 * config.kv_dim * width * context
    return {
        "launches": counted.steps(calls),
        "others": dispatches - len(calls),
        "products": counted.steps(call for call in calls if _is_product(call)),
        "bytes": sum(array.nbytes for _, array in tree_flatten(model.parameters())) + kv,
    }


def _is_product(call: Recorded) -> bool:
    """True if a launch multiplies with a whole packed matrix that is not a head's."""
    codes = [x for x in call.inputs if x.dtype == mx.uint32 and x.ndim == 2]
    results = sum(np.prod(shape) for shape in call.options["output_shapes"])
    return bool(codes) and codes[0].shape[0] == results


def _of_mlx(model: Model, counted: _Counted, kind: str, group: int) -> list[list[Any]]:
    """(how often, launches side by side) of MLX's own kernel on the matrices of the model's blocks."""
    # Gate and up don't wait for each other.
    sides: dict[str, list[int | None]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            side = path.replace("gate_proj", "up_proj")
            sides.setdefault(side, []).append(_qmv(layer.packed, counted, kind, group))
    if any(None in numbers for numbers in sides.values()):
        return []
    steps = Counter(map(tuple, sides.values()))
    return [[count, list(numbers)] for numbers, count in steps.items()]


def _qmv(packed: Any, counted: _Counted, kind: str, group: int) -> int | None:
    """MLX's kernel for a matrix of this shape and width of codes; None where it takes a slower one."""
    if packed.mode == "palette" or packed.in_dims % 512 or packed.out_dims % 8:
        return None
    shape = packed.out_dims, packed.in_dims
    return counted.add(published.qmv(kind, packed.bits, group, *shape))


def text() -> str:
    """What `prediction.json` holds: `collect`, a launch on each line."""
    data = collect()
    lines = ",\n".join(json.dumps(launch) for launch in data.pop("launches"))
    rest = json.dumps(data, indent=1).removeprefix("{\n")
    return f'{{\n"launches": [\n{lines}\n],\n{rest}\n'


def _range(row: dict[str, Any], key: str) -> str:
    return f"{row[f'{key}_low']:.0f} to {row[f'{key}_high']:.0f}"


def chips_table() -> str:
    """The 3B on every chip as Markdown."""
    lines = [
        "| chip | tokens/s | at 4,096 | of limit | over MLX, groups of 64 | of 128 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, chip in CHIPS.items():
        rows = [facts("afm-3b", name, context) for context in CONTEXTS]
        rates = " | ".join(_range(row, "decode_tokens_per_second") for row in rows)
        over = predict("afm-3b", CONTEXTS[0], chip).over_mlx
        ratios = " | ".join(f"{over[f'bfloat16, {group}']:.2f}x" for group in (64, 128))
        lines.append(f"| {chip.label} | {rates} | {rows[0]['share_of_bandwidth']:.0%} | {ratios} |")
    return "\n".join(lines)


def half_table() -> str:
    """The same over MLX's kernel by its types, on chips that don't know bfloat16, as Markdown."""
    lines = [
        "| chip | " + " | ".join(MLX_FORMATS) + " |",
        "| --- |" + " ---: |" * len(MLX_FORMATS),
    ]
    for chip in CHIPS.values():
        if chip.generation <= SHARES_PIPELINES:
            over = predict("afm-3b", CONTEXTS[0], chip).over_mlx
            lines.append(
                f"| {chip.label} | " + " | ".join(f"{over[f]:.2f}x" for f in MLX_FORMATS) + " |"
            )
    return "\n".join(lines)


def prompts_table() -> str:
    """Prompts of the 3B on every chip, in each way to multiply, as Markdown."""
    lines = [
        "| chip | " + " | ".join(PROMPT_WAYS) + " |",
        "| --- |" + " ---: |" * len(PROMPT_WAYS),
    ]
    for name, chip in CHIPS.items():
        rows = [prompt_facts("afm-3b", name, way) for way in PROMPT_WAYS]
        cells = " | ".join(_range(row, "prefill_tokens_per_second") for row in rows)
        lines.append(f"| {chip.label} | {cells} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The tables of docs/benchmarks.md, by their marks."""
    return {
        "ranges": published.ranges_table(),
        "matrices": published.table(published.MATRICES, published.FITTED_MATRICES),
        "decode": published.table(published.DECODES, published.FITTED),
        "prefill": published.table(published.PROMPTS + published.PEERS),
        "chips": chips_table(),
        "half": half_table(),
        "prompts": prompts_table(),
        "zoo": zoo_steps.table(),
    }


def with_tables(page: str) -> str:
    for mark, table in tables().items():
        begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{DOCS.name} has no marks for the table `{mark}`.")
        page = f"{before}{begin}{table}{end}{after}"
    return page


def main() -> None:
    DATA.write_text(text(), encoding="utf-8")
    _data.cache_clear()
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

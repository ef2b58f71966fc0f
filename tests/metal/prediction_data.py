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
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE, PRESET_RULES
from bench.predict import CHIPS, CONTEXTS, DATA, Launch, _data, predict
from tests.tools.graph import decode_cost

from . import launches, published
from .cost import count_launch
from .launches import Recorded

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MLX_GROUP = 64  # mlx-lm's own, when it quantizes


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
    presets = {name: _preset(name, counted) for name in PRESETS}
    kernels = [[*launch[:3], dict(launch.operations), *launch[4:]] for launch in counted.launches]
    return {"launches": kernels, "presets": presets}


def _preset(name: str, counted: _Counted) -> dict[str, Any]:
    model = launches.shapes_only(
        PRESETS[name], *PRESET_RULES.get(name, (AFM_RULE, AFM_EMBEDDING_RULE))
    )
    steps = {str(context): _step(model, context, counted) for context in CONTEXTS}
    return {"steps": steps, "mlx": _of_mlx(model, counted)}


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


def _of_mlx(model: Model, counted: _Counted) -> list[list[Any]]:
    """(how often, launches side by side) of MLX's own kernel on the matrices of the model's blocks."""
    # Gate and up don't wait for each other.
    sides: dict[str, list[int | None]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            side = path.replace("gate_proj", "up_proj")
            sides.setdefault(side, []).append(_qmv(layer.packed, counted))
    if any(None in numbers for numbers in sides.values()):
        return []
    steps = Counter(map(tuple, sides.values()))
    return [[count, list(numbers)] for numbers, count in steps.items()]


def _qmv(packed: Any, counted: _Counted) -> int | None:
    """MLX's kernel for a matrix of this shape and width of codes; None where it takes a slower one."""
    if packed.mode == "palette" or packed.in_dims % 512 or packed.out_dims % 8:
        return None
    shape = packed.out_dims, packed.in_dims
    return counted.add(published.qmv("bfloat16_t", packed.bits, MLX_GROUP, *shape))


def text() -> str:
    """What `prediction.json` holds: `collect`, a launch on each line."""
    data = collect()
    lines = ",\n".join(json.dumps(launch) for launch in data.pop("launches"))
    rest = json.dumps(data, indent=1).removeprefix("{\n")
    return f'{{\n"launches": [\n{lines}\n],\n{rest}\n'


def chips_table() -> str:
    """The 3B on every chip as Markdown, and what MLX was published to reach there."""
    lines = [
        "| chip | tokens/s | at 4,096 | of limit | over MLX | MLX on such a chip: published (predicted) |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, chip in CHIPS.items():
        short, long = (predict("afm-3b", context, chip) for context in CONTEXTS)
        rates = f"{short.tokens_per_second:.0f} | {long.tokens_per_second:.0f}"
        there = "; ".join(
            f"{', '.join(f.what.split(', ')[:2])}: {f.measured:.4g} ({f.predicted():.4g})"
            for f in published.FIGURES
            if f.chip == name and isinstance(f.runs, published.Model)
        )
        lines.append(
            f"| {chip.label} | {rates} | {short.share:.0%} | {short.over_mlx:.2f}x | {there} |"
        )
    return "\n".join(lines)


def with_tables(page: str) -> str:
    for mark, table in ("published", published.table()), ("chips", chips_table()):
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

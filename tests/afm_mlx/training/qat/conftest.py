"""Grids that weights train on."""

import pytest

from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import all_pairs

RULES = [
    QuantizationRule(bits, mode, per, 32 if per == "group" else None)
    for bits, mode, per in all_pairs((2, 4, 8), ("balanced", "affine"), ("tensor", "row", "group"))
]


@pytest.fixture(params=RULES, ids=lambda r: f"{r.bits}-{r.mode}-{r.granularity}")
def rule(request):
    return request.param

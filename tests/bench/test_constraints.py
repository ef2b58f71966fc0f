"""The benchmark of constraints, on a small model."""

import math

from bench import constraints
from bench.vocabulary import large_tokenizer
from tests.tools.constraints import nano_tokenizer, wide_model


def test_every_figure_is_measured(rng):
    model, tokenizer = wide_model(rng, extra=0), nano_tokenizer()
    figures = {f"steps {n}": constraints.steps(model, tokenizer, n, 3) for n in (1, 8)}
    figures["compiling"] = constraints.compiling(tokenizer, 5, 2)
    figures["first token"] = constraints.first_token(model, tokenizer, 2)
    masks = constraints.masks(tokenizer, 8, 5)
    assert 0 < masks["median"] <= masks["p99"]
    targets = constraints.targets(figures)
    assert len(targets) == 4
    assert all(0 < target.value < math.inf for target in targets)


def test_a_large_vocabulary_has_pieces_of_text():
    tokenizer = large_tokenizer(3000)
    assert len(tokenizer) == 3000
    text = "def the_value(self): return é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)

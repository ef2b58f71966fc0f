"""Rules that need each other."""

import time

from afm_mlx.guidance.schema.rules import either, fulfilled, seq, text


def test_rules_without_a_finite_text_are_taken_out_soon(rng):
    """Five hundred rules that name each other at random; of these, what leads to an end is kept."""
    names = [f"r{i}" for i in range(500)]
    rules = {}
    for name in names:
        options = [seq(*(("rule", str(one)) for one in rng.choice(names, 3))) for _ in range(30)]
        rules[name] = either(*options)
    start = time.process_time()
    assert fulfilled(rules) == {}
    rules["r7"] = either(text("x"), rules["r7"])
    kept = fulfilled(rules)
    assert "r7" in kept
    assert time.process_time() - start < 10
    named = either(seq(("rule", "a"), ("rule", "b")), text("c"))
    assert fulfilled({"a": named, "b": ("rule", "b")}) == {"a": text("c")}

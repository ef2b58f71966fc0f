"""Rules that need each other."""

from afm_mlx.guidance.schema.rules import either, fulfilled, seq, text


def test_rules_without_a_finite_text_are_taken_out():
    endless = either(seq(("rule", "a"), ("rule", "b")), text("c"))
    assert fulfilled({"a": endless, "b": ("rule", "b")}) == {"a": text("c")}


def test_a_rule_that_waits_for_many_is_noted_once():
    """It never has a text. Noted again each time that one of them has, it would be looked at 2^60 times."""
    ends = {f"end{i}": text(str(i)) for i in range(60)}
    endless = either(*(seq(("rule", end), ("rule", "endless")) for end in ends))
    assert fulfilled({**ends, "endless": endless}) == ends

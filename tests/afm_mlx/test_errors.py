"""What errors quote is bounded."""

from afm_mlx.errors import MESSAGE, SHOWN, AFMError, CheckpointError, named, shown


def test_short_values_are_shown_whole():
    for value in ["x", 3, [1, "a"], b"y", None, "a" * (SHOWN - 2)]:
        assert shown(value) == repr(value)


def test_long_values_are_cut_in_the_middle():
    for value in ["a" * 10**6, b"b" * 10**6, list(range(10**5)), "\x00" * 10**4]:
        text = shown(value)
        assert len(text) == SHOWN
        assert "..." in text
        assert text[:3] == repr(value)[:3]
        assert text[-1] == repr(value)[-1]


def test_what_has_no_text_is_named():
    nested: list = []
    for _ in range(10**5):
        nested = [nested]
    assert shown(10**5000) == "a int too large to be shown"
    assert shown(nested) == "a list too large to be shown"


def test_names_are_plain_where_they_can_be():
    assert named("model.layers.0") == "model.layers.0"
    assert named("a\nb") == "'a\\nb'"
    assert len(named("a" * 10**6)) == SHOWN


def test_a_message_is_bounded_whatever_it_quotes():
    for kind in [AFMError, CheckpointError]:
        message = str(kind(f"There is no {'x' * 10**6}; give another."))
        assert len(message) == MESSAGE
        assert message.startswith("There is no x")
        assert message.endswith("x; give another.")
        assert str(kind("short")) == "short"

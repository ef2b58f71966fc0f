"""Files of arguments: what is taken of YAML, and what each fault is called."""

import pytest
import yaml

from afm_mlx.cli.arguments import MAX_BYTES, UsageError, read_yaml


@pytest.fixture(autouse=True, params=[yaml.SafeLoader, getattr(yaml, "CSafeLoader", None)])
def loader(request, monkeypatch):
    """PyYAML has libyaml's where it was built with it, and its own otherwise."""
    if request.param is None:
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(yaml, "CSafeLoader", request.param, raising=False)


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(tmp_path / "c.yaml")

    return read


def test_values(read):
    found = read(
        "integers: [5, -5, 007, 1_000, 0x1F, 0b11, 0o17]\nfloats: [1e-5, 1., .5, -.inf]\n"
        "truths: [true, No]\nnothing: [~, null]\nempty:\n"
        "texts: [2001-13-45, 12:30, 0x_, '5', \"a\\nb\"]\nblock: |\n  a\n  b\n"
        "list:\n  - 1\n  - {b: {c: d}}\nü: a  # a comment\n"
        f"long: {'9' * 60000}x\n"  # what begins like a number takes no time
    )
    assert repr({name: setting.value for name, setting in found.items()}) == repr(
        {
            "integers": [5, -5, 7, 1000, 31, 3, 15],
            "floats": [1e-5, 1.0, 0.5, float("-inf")],
            "truths": [True, False],
            "nothing": [None, None],
            "empty": None,
            "texts": ["2001-13-45", "12:30", "0x_", "5", "a\nb"],
            "block": "a\nb\n",
            "list": [1, {"b": {"c": "d"}}],
            "ü": "a",
            "long": "9" * 60000 + "x",
        }
    )


def test_files_without_a_line(read):
    for text in ["", "# nothing\n", "---\n", "~", "{}", "\ufeff"]:
        assert read(text) == {}


def test_each_value_has_its_line(read):
    found = read("# arguments\na: 1\n\nb:\n  - 2\n")
    assert {name: setting.line for name, setting in found.items()} == {"a": 2, "b": 4}


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 24))


def test_faults_name_file_and_line(read):
    assert read("a: 1\nb: " + "[" * 19 + "]" * 19)["b"].line == 2
    for text, says in {
        BOMB: "line 1: anchors (&) and aliases (*) are not taken",
        "a: 1\nb: *c\n": "line 2: anchors (&) and aliases",
        "a: 1\nb: !!int x\n": "line 2: the tag 'tag:yaml.org,2002:int' is not taken",
        "a: !!python/object/apply:os.getcwd []": "line 1: the tag ",
        'a: 1\nb: "\\UFFFFFFFF"\n': "line 2: ",
        'a: 1\nb: "\\uD800"\n': "line 2",
        'a: 1\nb: "\\0"\n': "line 2, has a NUL",
        "a: 1\nb: \x00\n": "line 2: the character '\\x00' is not allowed",
        b"a: 1\nb: \xff\n": "line 2: byte 0xff is not UTF-8",
        "a: 1\nb: " + "9" * 5000: "line 2: a number has 5,000 characters",
        "a: 1\nb: " + "[" * 21 + "]" * 21: "line 2: lists and maps are nested deeper than 20",
        "a:\n" + "".join("  " * i + "- \n" for i in range(1, 50)): "deeper than 20",
        "a: 1\nb: 2\na: 3\n": "line 3: 'a' is there already, in line 1",
        "a: 1\n[b, c]: 2\n": "line 2: a name is needed before a colon",
        "a: 1\n---\nb: 2\n": "line 2: a second document begins",
        "- a\n- b\n": "line 1: 'name: value' lines are needed",
        "a: 1\nb: [\n": "line 3: ",
        "a: 1\n\tb: 2\n": "line 2: ",
        "x" * (MAX_BYTES + 1): "has more than the 65,536 bytes",
    }.items():
        with pytest.raises(UsageError) as caught:
            read(text)
        assert says in str(caught.value)
        assert "c.yaml" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none.yaml", tmp_path / ("a" * 5000)):
        with pytest.raises(UsageError, match="can't be read"):
            read_yaml(path)

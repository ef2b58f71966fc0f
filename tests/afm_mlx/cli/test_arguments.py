"""Arguments from the command line and YAML files: their order, their checks, and one line for each error."""

import pytest
import yaml

from afm_mlx.cli import generate
from afm_mlx.cli.arguments import MAX_BYTES, UsageError, parse, read_yaml


def test_texts_that_start_with_a_dash():
    for text in ["-", "--", "---", "-m", "--stop", "- a b"]:
        args = parse("generate", generate, [f"--prompt={text}", f"--stop={text}", "-m", "3"])
        assert (args.prompt, args.stop, args.max_tokens) == (text, [text], 3)


def test_what_can_not_be_used_is_one_line(fails):
    for argv, says in [
        (["--max-token", "5"], "did you mean --max-tokens?"),
        (["--top_p=0.5"], "did you mean --top-p?"),
        (["--frobnicate"], "--frobnicate"),
        (["--max-tokens"], "expected one argument"),
        (["-p", "--x"], "starts with a dash is written --prompt=TEXT. "),
        (["--stop", "--"], "starts with a dash is written --stop=TEXT. "),
        (["--max-tokens=--"], "'--' is not an integer"),
        (["-m", "many"], "'many' is not an integer"),
        (["-m", "9" * 5000], "is not an integer"),
        (["-m", "9" * 100], "allowed is -1 to 2147483647"),
        (["--kv-bits", "9" * 5000], "is not an integer"),
        (["--activation-bits", "4"], "invalid choice: 4 (choose from 16, 8)"),
        (["--prefill-step-size", "0"], "allowed is 1 or more"),
        (["--top-p", "1.5"], "allowed is 0 to 1"),
        (["--temp", "nan"], "allowed is 0 or more"),
        (["--temp", "inf"], "allowed is 0 to 1e+30"),
        (["--seed", "-1"], "allowed is 0 to"),
        (["--verbose", "loud"], "neither True nor False"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt", "a\udce9"], "--prompt/-p is not valid UTF-8: 'a\\udce9'"),
        (["--stop", "a", "\ud800"], "--stop is not valid UTF-8"),
        (["--model", "a\0b"], "--model has a NUL character"),
        (["--model", "x" * 100_000], "x..."),
        (["--" + "x" * 100_000], "unrecognized arguments"),
        (["--chat-template-config", "{"], "can't be used as JSON"),
        (["--chat-template-config", "[" * 100_000], "can't be used as JSON"),
        (["--chat-template-config", '{"a": NaN}'], "can't be used as JSON"),
        (["--chat-template-config", '{"a": "\\ud800"}'], "not valid UTF-8"),
        (["--chat-template-config", "[]"], "is not a JSON object"),
        (["--num-draft-tokens", "2"], "--num-draft-tokens needs --draft-model or --prompt-lookup"),
        (["--draft-model", "x", "--num-draft-tokens", "8"], "8 is out of range; allowed is 1 to 7"),
        (["--draft-model", "nowhere/x"], "nowhere/x"),
        (["-c", "no.yaml"], "no.yaml can't be read"),
        (["-c", "\udcff.yaml"], "--config is not valid UTF-8"),
    ]:
        line = fails("generate", *argv)
        assert says in line
        assert len(line) < 1300
    assert "COMMAND is not valid UTF-8" in fails("\udcff")
    assert "ADAPTER has a NUL character" in fails("adapter", "info", "a\0b")


def test_command_line_beats_yaml_beats_defaults(write_config):
    file = write_config(
        "max_tokens: 7\nmin_p: 1e-5\ntemp: 1\nverbose: false\nsliding_window: true\nstop: [a, b]\n"
        "prompt: '-'\nextra_eos_token: x\nchat_template_config: {deep: {x: 1e-5}}\nmodel:\n"
        "prompt_lookup: false\n"
    )
    args = parse("generate", generate, ["-c", str(file), "-m", "9"])
    assert (args.max_tokens, args.min_p, args.temp) == (9, 1e-5, 1.0)
    assert (args.verbose, args.sliding_window, args.prompt) == (False, True, "-")
    assert (args.stop, args.extra_eos_token) == (["a", "b"], ["x"])
    assert args.chat_template_config == {"deep": {"x": 1e-5}}
    assert (args.model, args.top_p) == ("afm-nano", 1.0)


def test_a_fault_of_a_file_is_one_line(write_config, fails):
    for text, says in {
        "max_token: 5": "line 1: unknown key max_token (did you mean max_tokens?)",
        "temp: 1\nmax-tokens: 5": "line 2: unknown key max-tokens (did you mean max_tokens?)",
        "5: 5": "unknown key 5",
        "config: x.yaml": "unknown key config",
        "max_tokens: 1.5": "max_tokens: '1.5' is not an integer",
        "max_tokens: true": "max_tokens: 'True' is not an integer; allowed is -1 or more",
        "top_p: [1]": "top_p: '[1]' is not a number",
        "chat_template_config: [1]": "'[1]' is not a JSON object, such as",
        "prompt: 5": "a string is needed",
        "prompt: [a]": "a string is needed",
        "top_p: 2": "top_p: 2 is out of range",
        "activation_bits: 4": "activation_bits is 4; allowed are 16, 8",
        "sliding_window: 1": "allowed are true and false",
        "verbose: loud": "neither True nor False",
        "num_draft_tokens: 0": "num_draft_tokens: 0 is out of range; allowed is 1 to 7",
        "a: [": "is not valid YAML",
    }.items():
        assert says in fails("generate", "-c", write_config(text))
    file = write_config("lora_parameters: {rank: true}\ndata: .")
    assert "rank: 'True' is not an integer" in fails("lora", "-c", file)
    assert "(did you mean affine?)" in fails("convert", "-c", write_config("q_mode: afine"))
    assert "did you mean affine?" in fails("convert", "--q-mode", "afine")


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

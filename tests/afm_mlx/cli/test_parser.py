"""Arguments from the command line and from a file: what is taken, and what each fault is called."""

from afm_mlx.cli import generate
from afm_mlx.cli.arguments import parse


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
        (
            ["--draft-model", "x", "--num-draft-tokens", "8"],
            "8 is out of range; allowed is 1 to 7",
        ),
        (["--draft-model", "nowhere/x"], "nowhere/x"),
        (["--image", "a.png"], "text only"),
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

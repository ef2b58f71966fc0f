"""What all commands share: help, imports, errors, exit statuses, YAML."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

import afm_mlx
from afm_mlx.cli import COMMANDS, chat, generate, info, main
from afm_mlx.cli.parser import parse
from afm_mlx.kernels.cpu import extension
from afm_mlx.loading import resolve
from tests.tools.cli import ROOT, process, write_folder

# -- help, version, and what they import

HEAVY = "mlx prompt_toolkit numpy transformers mlx_lm tokenizers sentencepiece yaml tqdm".split()


def test_help_and_usage_errors_import_nothing_heavy():
    code = f"""
import sys
from afm_mlx.cli import COMMANDS, main
assert main(["--help"]) == main(["--version"]) == 0
for command in COMMANDS:
    assert main([command, "--help"]) == 0
    assert main([command, "--no-such-flag"]) == 2
print("IMPORTED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = process(code=code)
    assert done.stdout.splitlines()[-1] == "IMPORTED []", done.stderr
    assert all(f"\n  {command}" in done.stdout for command in COMMANDS)


def test_generation_imports_neither_mlx_lm_nor_transformers(folder):
    code = """
import sys
from afm_mlx import batch_generate, load, make_logits_processors, make_sampler
from afm_mlx.cli import main
sampled = "--temp 0.7 --top-p 0.9 --min-p 0.01 --top-k 50 --xtc-probability 0.5".split()
for options in ([], sampled):
    assert main(["generate", "--model", sys.argv[1], "-m", "3", *options]) == 0
model, tokenizer = load(sys.argv[1])
found = batch_generate(model, tokenizer, ["a", "b"], 3, sampler=make_sampler(0.7, 0.9), logits_processors=(
    make_logits_processors({5: 1.0}, 1.1, presence_penalty=0.5, frequency_penalty=0.5)
))
assert list(map(len, found.token_ids)) == [3, 3]
print("IMPORTED", [name for name in ("mlx_lm", "transformers", "torch") if name in sys.modules])
"""
    done = process(folder, code=code)
    assert done.stdout.splitlines()[-1:] == ["IMPORTED []"], done.stderr


def test_python_m(tmp_path):
    done = process("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"afm-mlx {afm_mlx.__version__}\n")


def test_defaults_are_mlx_lms(capsys):
    # `mlx_lm.generate` is also the name of a function.
    theirs = {name: import_module(f"mlx_lm.{name}") for name in ("generate", "chat")}

    for name, command in (("generate", generate), ("chat", chat)):
        defaults = vars(theirs[name].setup_arg_parser().parse_args([]))
        ours = vars(parse(name, command, []))
        shared = set(defaults) & set(ours) - {"model", "extra_eos_token"}
        assert {k: ours[k] for k in shared} == {k: defaults[k] for k in shared}
        # What is not taken is refused, not ignored.
        for flag in set(defaults) - set(ours):
            assert main([name, "--" + flag.replace("_", "-"), "1"]) == 2
            assert "unrecognized" not in capsys.readouterr().err


def test_texts_that_start_with_a_dash():
    for text in ["-", "--", "---", "-m", "--stop", "- a b"]:
        args = parse("generate", generate, [f"--prompt={text}", f"--stop={text}", "-m", "3"])
        assert (args.prompt, args.stop, args.max_tokens) == (text, [text], 3)


def test_a_text_taken_for_an_option_is_explained(fails):
    for name, argv in {"prompt": ["-p", "--x"], "stop": ["--stop", "--"]}.items():
        assert f"starts with a dash is written --{name}=TEXT. " in fails("generate", *argv)
    assert "-- is not an integer" in fails("generate", "--max-tokens=--").replace("'", "")


def test_the_embedded_model_is_the_default(tmp_path, spm_bpe, rng, monkeypatch, run):
    write_folder(tmp_path / "afm-nano", spm_bpe, rng)
    monkeypatch.setattr(resolve, "_EMBEDDED_FOLDER", tmp_path)
    status, out, _ = run("generate", "--json", "-m", 2)
    assert (status, json.loads(out)["generation_tokens"]) == (0, 2)


# -- main


def test_what_the_user_got_wrong_is_one_line(fails):
    for argv, says in [
        ([], "a command is needed"),
        (["frobnicate"], "frobnicate"),
        (["generat"], "did you mean generate?"),
        (["adapter", "conver"], "did you mean convert?"),
        (["generate", "--max-token", "5"], "did you mean --max-tokens?"),
        (["generate", "--top_p=0.5"], "did you mean --top-p?"),
        (["convert", "--q-mode", "afine"], "did you mean affine?"),
        (["generate", "--frobnicate"], "--frobnicate"),
        (["generate", "--max-tokens"], "expected one argument"),
        (["generate", "-m", "many"], "'many' is not an integer"),
        (["generate", "--prefill-step-size", "0"], "allowed is 1 or more"),
        (["generate", "--top-p", "1.5"], "allowed is 0 to 1"),
        (["generate", "--temp", "nan"], "allowed is 0 or more"),
        (["generate", "--temp", "inf"], "allowed is 0 to 1e+30"),
        (["generate", "--temp", "-1"], "allowed is 0 or more"),
        (["generate", "--seed", "-1"], "allowed is 0 to"),
        (["generate", "--verbose", "loud"], "neither True nor False"),
        (["generate", "--prompt", " \n"], "the prompt is empty"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--chat-template-config", "{"], "can't be used as JSON"),
        (["generate", "--chat-template-config", "[]"], "is not a JSON object"),
        (["generate", "--draft-model", "x"], "speculative decoding is not available"),
        (["generate", "--image", "a.png"], "text only"),
        (["generate", "--model", "no/such/folder"], "There is no folder no/such/folder"),
        (["generate", "-c", "no.yaml"], "no.yaml can't be read"),
        (["chat", "--pipeline"], "several machines"),
        (["convert"], "--model is missing"),
        (["convert", "--model", "x", "--q-bits", "4"], "--q-bits without -q"),
        (["convert", "--model", "x", "-q", "--q-mode", "int4"], "invalid choice"),
        (["convert", "--model", "afm-nano", "-q"], "quantized already"),
        (["convert", "--model", "x", "--upload-repo", "a/b"], "nothing is uploaded"),
        (["convert", "--model", "x", "--dtype", "int3"], "invalid choice"),
        (["convert", "--model", "no/such/folder"], "There is no folder"),
        (["info", "--preset", "afm-9b"], "invalid choice"),
        (["info", "--preset", "afm-3b", "--model", "x"], "can't both be given"),
        (["perplexity", "--num-samples", "0"], "allowed are 1 and more"),
        (["perplexity", "--sequence-length", "1"], "allowed is 2 or more"),
        (["perplexity", "--data-path", "no.jsonl"], "no file or folder no.jsonl"),
        (["evaluate", "--tasks", "hellaswag"], "mlx_lm.evaluate"),
        (["evaluate", "--batch-size", "0"], "allowed is 1 to 4096"),
    ]:
        assert says in fails(*argv)


def test_debug_keeps_the_traceback(run):
    with pytest.raises(afm_mlx.errors.AFMError):
        main(["generate", "--model", "no/such/folder", "--debug"])


def test_texts_that_nothing_takes(fails):
    for argv, says in [
        (["generate", "--prompt", "a\udce9"], "--prompt/-p is not valid UTF-8: 'a\\udce9'"),
        (["generate", "--model", "\udcff/x"], "--model is not valid UTF-8"),
        (["info", "--model", "a\0b"], "--model has a NUL character"),
        (["adapter", "info", "a\0b"], "ADAPTER has a NUL character"),
        (["generate", "--stop", "a", "\ud800"], "--stop is not valid UTF-8"),
        (["generate", "--chat-template-config", '{"a": "\\ud800"}'], "not valid UTF-8"),
        (["generate", "-c", "\udcff.yaml"], "--config is not valid UTF-8"),
        (["\udcff"], "COMMAND is not valid UTF-8"),
        (["generate", "-m", "9" * 5000], "is not an integer"),
        (["generate", "-m", "9" * 100], "allowed is -1 to 2147483647"),
        (["generate", "--kv-bits", "9" * 5000], "is not an integer"),
        (["generate", "--model", "x" * 100_000], "x..."),
        (["generate", "--" + "x" * 100_000], "unrecognized arguments"),
        (["generate", "--chat-template-config", "[" * 100_000], "can't be used as JSON"),
        (["adapter", "compose", "x" * 100_000, "--output", "y"], "no adapter with a weight"),
    ]:
        line = fails(*argv)
        assert says in line
        assert len(line) < 1300


def test_too_little_memory_is_one_line(monkeypatch, fails):
    for kind in (MemoryError, RuntimeError):
        error = kind("[malloc] Unable to allocate 99999999 bytes.")
        monkeypatch.setattr(info, "run", Mock(side_effect=error))
        assert "there is not enough memory ([malloc] Unable" in fails("info")


def test_our_own_defects_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(info, "run", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError):
        main(["info"])


def test_an_error_about_a_file_is_one_line(monkeypatch, fails):
    monkeypatch.setattr(info, "run", lambda args: Path("/no/such\nfile").read_text())
    assert "No such file" in fails("info")


def test_interrupt(monkeypatch, run):
    monkeypatch.setattr(info, "run", Mock(side_effect=KeyboardInterrupt))
    assert run("info") == (130, "", "afm-mlx: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error():
    for argv in (["--help"], ["info", "--preset", "afm-3b"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "afm_mlx", *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


# -- YAML


def test_command_line_beats_yaml_beats_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "max_tokens: 7\nmin_p: 1e-5\ntemp: 1\nverbose: false\nsliding_window: true\nstop: [a, b]\n"
        "prompt: '-'\nextra_eos_token: x\nchat_template_config: {deep: {x: 1e-5}}\nmodel:\n"
    )
    args = parse("generate", generate, ["-c", str(file), "-m", "9"])
    assert (args.max_tokens, args.min_p, args.temp) == (9, 1e-5, 1.0)
    assert (args.verbose, args.sliding_window, args.prompt) == (False, True, "-")
    assert (args.stop, args.extra_eos_token) == (["a", "b"], ["x"])
    assert args.chat_template_config == {"deep": {"x": 1e-5}}
    assert (args.model, args.top_p) == ("afm-nano", 1.0)


def test_bad_yaml_is_one_line(tmp_path, fails):
    for text, says in [
        ("max_token: 5", "line 1: unknown key max_token (did you mean max_tokens?)"),
        ("temp: 1\nmax-tokens: 5", "line 2: unknown key max-tokens (did you mean max_tokens?)"),
        ("5: 5", "unknown key 5"),
        ("config: x.yaml", "unknown key config"),
        ("max_tokens: many", "max_tokens: 'many' is not an integer"),
        ("max_tokens: 1.5", "max_tokens: '1.5' is not an integer"),
        ("max_tokens: true", "max_tokens is True"),
        ("prompt: 5", "a string is needed"),
        ("prompt: [a]", "a string is needed"),
        ("top_p: 2", "top_p: 2 is out of range"),
        ("kv_bits: 8.5", "kv_bits: '8.5' is not an integer"),
        ("sliding_window: 1", "allowed are true and false"),
        ("verbose: loud", "neither True nor False"),
        ("draft_model: x", "speculative decoding is not available"),
        ("- a\n- b", "'name: value' lines are needed"),
        ("a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML, line 1: the tag "),
    ]:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        assert says in fails("generate", "-c", file)


def test_choices_hold_in_yaml(tmp_path, fails):
    file = tmp_path / "c.yaml"
    file.write_text("dtype: int3")
    assert "allowed are float16" in fails("convert", "-c", file)


@pytest.mark.parametrize("name", ["AFM_MLX_KERNELS", "AFM_MLX_ISA", "AFM_MLX_THREADS"])
def test_settings_that_cannot_be_used(name):
    if name != "AFM_MLX_KERNELS" and not extension.status().available:
        pytest.skip("needs the C++ extension")
    command = [sys.executable, "-m", "afm_mlx", "generate", "--prompt", "hi"]
    environment = {**os.environ, name: "nonsense"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"afm-mlx: error: {name} is 'nonsense'")
    assert result.stderr.count("\n") == 1

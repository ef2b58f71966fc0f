"""The command line, in this process where that shows the same, and in processes of its own."""

import io
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx import loading
from afm_mlx.cli import COMMANDS, main, options
from afm_mlx.cli.conversation import Conversation
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.errors import ContextLengthError
from afm_mlx.generation import stream_generate
from afm_mlx.loading import load
from afm_mlx.tokenizer import load_tokenizer, save_tokenizer
from afm_mlx.weights import save_weights
from tests.tools.models import random_model

# Without int8 codes, whose rounding depends on how many tokens are computed at a time.
CONFIG = ModelConfig(
    vocab_size=1000,
    hidden_dim=32,
    num_layers=3,
    num_kv_reuse_layers=1,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=10000.0,
    kv_bits=None,
    context_length=256,
)
ROOT = Path(afm_mlx.__file__).parent.parent


def write_folder(folder: Path, spm: Path, rng, config: ModelConfig = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_tokenizer(spm, folder)
    weights = dict(tree_flatten(random_model(config, rng).parameters()))
    # Logits of 0 are never the highest: no answer ends by itself, whatever the random weights.
    ends = mx.array(sorted(load_tokenizer(folder).eos_token_ids))
    weights["model.embedding.weight"][ends] = 0
    save_weights(folder, weights)
    return folder


@pytest.fixture
def folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng)


@pytest.fixture
def run(capsys):
    """Run a command; returns its status, its output and its errors."""

    def run(*argv):
        status = main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fails(run):
    """Run a command that must fail for what the user got wrong; returns the one line."""

    def fails(*argv, output=""):
        status, out, err = run(*argv)
        assert (status, out) == (2, output)
        assert err.startswith("afm-mlx: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err

    return fails


@pytest.fixture
def say(monkeypatch):
    """Put bytes on standard input."""

    def say(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return say


def process(*argv, code=None, **options):
    command = [sys.executable, *(["-c", code] if code else ["-m", "afm_mlx"]), *map(str, argv)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


# -- help, version, and what they import

HEAVY = ("mlx", "numpy", "transformers", "mlx_lm", "tokenizers", "sentencepiece", "yaml", "tqdm")


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


def test_a_greedy_run_imports_neither_mlx_lm_nor_transformers(folder):
    code = """
import sys
from afm_mlx.cli import main
assert main(sys.argv[1:]) == 0
print("IMPORTED", [name for name in ("mlx_lm", "transformers", "torch") if name in sys.modules])
"""
    done = process("generate", "--model", folder, "-m", 3, code=code)
    assert done.stdout.splitlines()[-1] == "IMPORTED []", done.stderr


def test_python_m(tmp_path):
    done = process("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"afm-mlx {afm_mlx.__version__}\n")


def test_defaults_are_mlx_lms(capsys):
    # `mlx_lm.generate` is also the name of a function.
    theirs = {name: import_module(f"mlx_lm.{name}") for name in ("generate", "chat")}

    from afm_mlx.cli import chat, generate
    from afm_mlx.cli.parser import parse

    for name, command in (("generate", generate), ("chat", chat)):
        defaults = vars(theirs[name].setup_arg_parser().parse_args([]))
        ours = vars(parse(name, command, []))
        shared = set(defaults) & set(ours) - {"model", "extra_eos_token"}
        assert {k: ours[k] for k in shared} == {k: defaults[k] for k in shared}
        # What is not taken is refused, not ignored.
        for flag in set(defaults) - set(ours):
            assert main([name, "--" + flag.replace("_", "-"), "1"]) == 2
            assert "unrecognized" not in capsys.readouterr().err


def test_the_embedded_model_is_the_default(tmp_path, spm_bpe, rng, monkeypatch, run):
    assert options.EMBEDDED_MODEL == loading.EMBEDDED_MODEL
    write_folder(tmp_path / "afm-nano", spm_bpe, rng)
    monkeypatch.setattr(loading, "_EMBEDDED_FOLDER", tmp_path)
    status, out, _ = run("generate", "--json", "-m", 2)
    assert (status, json.loads(out)["generation_tokens"]) == (0, 2)


# -- main


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "a command is needed"),
        (["frobnicate"], "frobnicate"),
        (["generate", "--frobnicate"], "--frobnicate"),
        (["generate", "--max-tokens"], "expected one argument"),
        (["generate", "-m", "many"], "'many' is not an integer"),
        (["generate", "--prefill-step-size", "0"], "allowed is 1 or more"),
        (["generate", "--top-p", "1.5"], "allowed is 0 to 1"),
        (["generate", "--temp", "nan"], "allowed is 0 or more"),
        (["generate", "--temp", "inf"], "allowed is 0 or more"),
        (["generate", "--temp", "-1"], "allowed is 0 or more"),
        (["generate", "--seed", "-1"], "allowed is 0 to"),
        (["generate", "--verbose", "loud"], "neither True nor False"),
        (["generate", "--prompt", " \n"], "the prompt is empty"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--chat-template-config", "{"], "is not JSON"),
        (["generate", "--chat-template-config", "[]"], "is not a JSON object"),
        (["generate", "--draft-model", "x"], "speculative decoding is not available"),
        (["generate", "--image", "a.png"], "text only"),
        (["generate", "--model", "no/such/folder"], "There is no folder no/such/folder"),
        (["generate", "-c", "no.yaml"], "no.yaml can't be read"),
        (["chat", "--pipeline"], "several machines"),
        (["convert"], "--model is missing"),
        (["convert", "--model", "x", "-q"], "quantizing is not available"),
        (["convert", "--model", "x", "--q-bits", "4"], "quantizing is not available"),
        (["convert", "--model", "x", "--upload-repo", "a/b"], "nothing is uploaded"),
        (["convert", "--model", "x", "--dtype", "int3"], "invalid choice"),
        (["convert", "--model", "no/such/folder"], "There is no folder"),
        (["info", "--preset", "afm-9b"], "invalid choice"),
        (["info", "--preset", "afm-3b", "--model", "x"], "can't both be given"),
        (["perplexity", "--num-samples", "0"], "allowed are 1 and more"),
        (["perplexity", "--sequence-length", "1"], "allowed is 2 or more"),
        (["perplexity", "--data-path", "no.jsonl"], "no file or folder no.jsonl"),
        (["evaluate", "--tasks", "hellaswag"], "mlx_lm.evaluate"),
        (["evaluate", "--batch-size", "0"], "allowed is 1 or more"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(fails, argv, says):
    assert says in fails(*argv)


def test_debug_keeps_the_traceback(run):
    with pytest.raises(afm_mlx.errors.AFMError):
        main(["generate", "--model", "no/such/folder", "--debug"])


def test_our_own_defects_keep_their_traceback(monkeypatch):
    from afm_mlx.cli import info

    def broken(args):
        raise RuntimeError("a defect")

    monkeypatch.setattr(info, "run", broken)
    with pytest.raises(RuntimeError):
        main(["info"])


def test_an_error_about_a_file_is_one_line(monkeypatch, fails):
    from afm_mlx.cli import info

    monkeypatch.setattr(info, "run", lambda args: Path("/no/such\nfile").read_text())
    assert "No such file" in fails("info")


def test_interrupt(monkeypatch, run):
    from afm_mlx.cli import info

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupted)
    assert run("info") == (130, "", "afm-mlx: interrupted\n")


@pytest.mark.parametrize(
    "argv", [["--help"], ["generate", "--help"], ["info", "--preset", "afm-3b"]]
)
def test_a_reader_that_has_seen_enough_is_no_error(argv):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "afm_mlx", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


# -- YAML


def test_command_line_beats_yaml_beats_defaults(tmp_path):
    from afm_mlx.cli import generate
    from afm_mlx.cli.parser import parse

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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_token: 5", "unknown key max_token"),
        ("max-tokens: 5", "unknown key max-tokens"),
        ("5: 5", "unknown key 5"),
        ("config: x.yaml", "unknown key config"),
        ("max_tokens: many", "max_tokens: 'many' is not an integer"),
        ("max_tokens: 1.5", "max_tokens: '1.5' is not an integer"),
        ("max_tokens: true", "max_tokens is True"),
        ("prompt: 5", "a string is needed"),
        ("prompt: [a]", "a string is needed"),
        ("top_p: 2", "top_p: 2 is out of range"),
        ("kv_bits: 8.5", "kv_bits is 8.5"),
        ("sliding_window: 1", "allowed are true and false"),
        ("verbose: loud", "neither True nor False"),
        ("draft_model: x", "speculative decoding is not available"),
        ("- a\n- b", "'name: value' lines are needed"),
        ("a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path, fails, text, says):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert says in fails("generate", "-c", file)


def test_choices_hold_in_yaml(tmp_path, fails):
    file = tmp_path / "c.yaml"
    file.write_text("dtype: int3")
    assert "allowed are float16" in fails("convert", "-c", file)


# -- generate


def answer(folder, prompt, **options):
    """What the library says, with mlx-lm's default of 100 tokens cut to 12."""
    model, tokenizer = load(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True
    )
    return "".join(
        r.text for r in stream_generate(model, tokenizer, ids, **{"max_tokens": 12, **options})
    )


def test_generate_prints_as_mlx_lm_does(folder, run):
    status, out, err = run("generate", "--model", folder, "-p", "A list", "-m", 12)
    rule = "=" * 10
    text = answer(folder, "A list")
    assert (status, err) == (0, "")
    assert out.startswith(f"{rule}\n{text}\n{rule}\nPrompt: ")
    lines = out[len(f"{rule}\n{text}\n{rule}\n") :].splitlines()
    assert [line.split(":")[0] for line in lines] == ["Prompt", "Generation", "Peak memory"]
    assert "tokens-per-sec" in lines[0]
    assert "Generation: 12 tokens, " in lines[1]
    quiet = run("generate", "--model", folder, "-p", "A list", "-m", 12, "--verbose", "F")
    assert quiet == (0, f"{text}\n", "")


def test_generate_json(folder, run):
    status, out, _ = run("generate", "--model", folder, "-p", r"A\nlist", "-m", 12, "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["text"] == answer(folder, "A\nlist")
    assert len(facts["tokens"]) == facts["generation_tokens"] == 12
    assert facts["finish_reason"] == "length"


def test_prompt_from_standard_input(folder, run, say):
    say("Wörter\nund mehr\n".encode())
    status, out, _ = run("generate", "--model", folder, "-p", "-", "-m", 12, "--verbose", "F")
    assert (status, out) == (0, answer(folder, "Wörter\nund mehr") + "\n")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"caf\xc3", b"", b"\n"])
def test_unusable_standard_input(folder, fails, say, data):
    say(data)
    line = fails("generate", "--model", folder, "-p", "-")
    assert ("empty" if not data.strip() else "not UTF-8") in line


def test_prompt_options(folder, run):
    _, tokenizer = load(folder)

    def tokens_of(*argv):
        status, out, err = run("generate", "--model", folder, "-p", "hi", "-m", 1, "--json", *argv)
        assert status == 0, err
        return json.loads(out)["prompt_tokens"]

    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be brief."}
    chat = tokenizer.apply_chat_template
    assert tokens_of("--ignore-chat-template") == len(tokenizer.encode("hi", True))
    assert tokens_of("--system-prompt", "Be brief.") == len(
        chat([system, user], add_generation_prompt=True)
    )
    prefilled = [user, {"role": "assistant", "content": "Well, the"}]
    assert tokens_of("--prefill-response", "Well, the") == len(
        chat(prefilled, continue_final_message=True)
    )
    assert tokens_of("--chat-template-config", '{"tools": [{"name": "f"}]}') == len(
        chat([user], tools=[{"name": "f"}], add_generation_prompt=True)
    )


def test_stop_and_end_tokens(folder, run):
    model, tokenizer = load(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "A list"}], add_generation_prompt=True
    )
    steps = list(stream_generate(model, tokenizer, prompt, max_tokens=12))
    third = tokenizer.convert_ids_to_tokens(steps[2].token)
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--json")
    ended = json.loads(run(*argv, "--extra-eos-token", third)[1])
    assert ended["finish_reason"] == "stop"
    assert ended["tokens"] == [s.token for s in steps][: ended["generation_tokens"]]
    assert ended["generation_tokens"] <= 3
    text = "".join(s.text for s in steps)
    stopped = json.loads(run(*argv, "--stop", text[4:6])[1])
    assert stopped["text"] == text[: text.index(text[4:6])]


def test_sampling_follows_the_seed(folder, run):
    def sample(seed, *argv):
        argv = ("--temp", 1, "--seed", seed, "-m", 20, "--verbose", "F", *argv)
        status, out, err = run("generate", "--model", folder, *argv)
        assert status == 0, err
        return out

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1
    assert sample(5, "--top-k", 1) == sample(6, "--top-k", 1)  # only the likeliest is left


def test_a_full_context_ends_with_the_text_so_far(folder, run, fails):
    argv = ("generate", "--model", folder, "-p", "A list", "--verbose", "F")
    used = json.loads(run(*argv, "-m", 1, "--json")[1])["prompt_tokens"]
    line = fails(
        *argv, "--max-kv-size", used + 4, output=answer(folder, "A list", max_tokens=5) + "\n"
    )
    assert f"context of {used + 4} tokens is full" in line
    assert "The prompt needs" in fails(*argv, "--max-kv-size", used - 1)
    status, _, err = run(*argv, "-m", 30, "--max-kv-size", used + 4, "--sliding-window")
    assert (status, err) == (0, "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-m", "0"], "max_tokens is 0"),
        (["--kv-bits", "4"], "kv_bits is 4"),
        (["--kv-bits", "8"], "kv_bits is 8"),  # a model without scales
        (["--adapter-path", "x"], "adapters for AFM models are not available"),
        (["--xtc-probability", "0.5"], "--temp"),
        (["--temp", "1", "--top-k", "1000"], "1000 tokens"),
        (["--extra-eos-token", "nosuchpiece"], "nosuchpiece"),
        (["--stop", ""], "non-empty"),
        (["--prompt", "\udcff"], "surrogate"),
        (["--chat-template-config", '{"tokenize": false}'], "can't set tokenize"),
        (["--ignore-chat-template", "--system-prompt", "x"], "--system-prompt needs"),
        (["--ignore-chat-template", "--prefill-response", "x"], "--prefill-response needs"),
        (["--prompt-cache-file", "x.bin"], "a .safetensors file is needed"),
        (["--prompt-cache-file", "no/folder/x.safetensors"], "there is no folder"),
        (["--prompt-cache-file", "x.safetensors", "--sliding-window"], "can't be combined"),
    ],
)
def test_what_a_model_refuses_is_one_line(folder, fails, argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in fails("generate", "--model", folder, *argv)


def test_damaged_folders_are_one_line(folder, fails):
    argv = ("generate", "--model", folder)
    assert "is a file" in fails("generate", "--model", folder / "config.json")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in fails(*argv)
    assert "model.safetensors" in fails("info", "--model", folder)
    weights.write_bytes(whole)
    (folder / "tokenizer.model").write_bytes(b"\n\nno tokenizer\n")
    assert "tokenizer.model" in fails(*argv)
    (folder / "config.json").write_text('{"model_type": "afm7",\n\n "x"}')
    assert "config.json" in fails(*argv)


# -- prompt cache files


def test_prompt_cache_file(folder, run, tmp_path):
    file = tmp_path / "prompt.safetensors"
    document = "The quick brown fox and the lazy dog, in a long text. " * 3

    def ask(question, *argv):
        status, out, err = run(
            "generate", "--model", folder, "-p", document + question, "-m", 12, "--json", *argv
        )
        assert (status, err) == (0, "")
        return json.loads(out)

    questions = ["Who is quick?", "Who is lazy?", "Who is quick?", ""]
    alone = [ask(question) for question in questions]
    first = ask(questions[0], "--prompt-cache-file", file)
    assert first["tokens"] == alone[0]["tokens"]
    content = file.read_bytes()
    for question, expected in zip(questions, alone, strict=True):
        cached = ask(question, "--prompt-cache-file", file)
        assert cached["tokens"] == expected["tokens"]
        assert cached["prompt_tokens"] < expected["prompt_tokens"] / 2
    assert file.read_bytes() == content


def test_prompt_cache_files_that_do_not_fit(folder, run, fails, tmp_path, spm_bpe, rng):
    file = tmp_path / "prompt.safetensors"
    argv = ("generate", "--model", folder, "-m", 2, "--prompt-cache-file", file)
    assert run(*argv)[0] == 0
    other = write_folder(tmp_path / "other", spm_bpe, rng)
    assert "another model" in fails(*(other if a == folder else a for a in argv))
    assert "The prompt cache has" in fails(*argv, "--max-kv-size", 99)
    file.write_bytes(file.read_bytes()[:-10])
    assert "prompt.safetensors" in fails(*argv)


def test_a_cache_file_that_does_not_say_its_tokens(folder, fails, tmp_path):
    from afm_mlx.prompt_cache import save_prompt_cache

    model, _ = load(folder)
    cache = model.make_cache(max_size=256)
    model.prefill(mx.array([[1, 2, 3]]), cache)
    save_prompt_cache(tmp_path / "c.safetensors", cache, model)
    argv = ("--prompt-cache-file", tmp_path / "c.safetensors")
    assert "which tokens" in fails("generate", "--model", folder, *argv)


# -- chat


def scratch_answer(model, tokenizer, messages, **options):
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, **options))
    return "".join(r.text for r in responses), len(prompt)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_a_cached_conversation_is_the_one_from_scratch(folder, rng, system_prompt, sliding):
    model, tokenizer = load(folder)
    # Answers that end by themselves, and answers that are cut.
    tokenizer.eos_token_ids.update(range(0, 1000, 9))
    limits = {"max_kv_size": 48, "sliding_window": True} if sliding else {}
    cache_limits = {"max_size": 48 if sliding else 256, "sliding_window": sliding}

    def new_cache():
        return model.make_cache(**cache_limits)

    conversation = Conversation(model, tokenizer, new_cache, system_prompt)
    for turn in range(5):
        words = rng.choice("the quick brown fox can be lazy".split(), 4)
        question = " ".join(words)
        asked = [*conversation.messages, {"role": "user", "content": question}]
        shown = []
        last = conversation.ask(question, shown.append, max_tokens=10, **limits)
        expected, whole = scratch_answer(model, tokenizer, asked, max_tokens=10, **limits)
        if not sliding:
            assert "".join(shown) == expected
        if turn and not sliding:
            # Of what came before, no more is computed again than the last answer's tokenization.
            assert last.prompt_tokens < whole - 20
    conversation.reset()
    shown = []
    conversation.ask("the fox", shown.append, max_tokens=10, **limits)
    asked = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked.append({"role": "user", "content": "the fox"})
    assert "".join(shown) == scratch_answer(model, tokenizer, asked, max_tokens=10, **limits)[0]


def test_an_interrupted_answer_stays_in_the_conversation(folder):
    model, tokenizer = load(folder)
    conversation = Conversation(model, tokenizer, lambda: model.make_cache(max_size=256))
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == 4:
            raise KeyboardInterrupt

    assert conversation.ask("the fox", show, max_tokens=10) is None
    said = "".join(shown)
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    shown = []
    asked = [*conversation.messages, {"role": "user", "content": "and then"}]
    conversation.ask("and then", shown.append, max_tokens=10)
    assert "".join(shown) == scratch_answer(model, tokenizer, asked, max_tokens=10)[0]


def test_a_full_context_leaves_the_conversation_as_it_was(folder):
    model, tokenizer = load(folder)
    conversation = Conversation(model, tokenizer, lambda: model.make_cache(max_size=160))
    conversation.ask("the fox", [].append, max_tokens=10)
    before = list(conversation.messages)
    for question, limit in (("the fox " * 90, 10), ("the dog", -1)):
        with pytest.raises(ContextLengthError):
            conversation.ask(question, [].append, max_tokens=limit)
        assert conversation.messages == before
    shown = []
    conversation.ask("hm", shown.append, max_tokens=3)
    asked = [*before, {"role": "user", "content": "hm"}]
    expected, _ = scratch_answer(model, tokenizer, asked, max_tokens=3)
    assert "".join(shown) == expected


def test_chat_through_pipes(folder, run, say):
    say(b"the fox\n\nh\nr\nthe fox\nq\nnot reached\n")
    status, out, err = run("chat", "--model", folder, "-m", 12)
    text = answer(folder, "the fox")
    assert (status, out) == (0, f"{text}\n{text}\n")
    assert err.splitlines()[0].startswith("q quits, r forgets")
    assert err.splitlines()[1] == "The conversation is forgotten."


def test_chat_ends_with_its_input(folder, run, say):
    say(b"the fox")
    assert run("chat", "--model", folder, "-m", 12)[:2] == (0, answer(folder, "the fox") + "\n")


def test_chat_survives_a_full_context(folder, run, say):
    say(b"the fox\n" + b"fox " * 300 + b"\nthe fox\nr\nthe fox\n")
    status, out, err = run("chat", "--model", folder, "-m", 5)
    assert status == 0
    assert len(err.splitlines()) == 2
    assert "The prompt needs" in err
    assert "or r starts anew" in err.splitlines()[0]
    text = answer(folder, "the fox", max_tokens=5)
    assert out.startswith(f"{text}\n")
    assert out.endswith(f"{text}\n")


def test_chat_refuses_bytes_that_are_no_text(folder, fails, say):
    say(b"\xff\n")
    assert "line 1 of standard input is not UTF-8" in fails("chat", "--model", folder)


def test_chat_ends_at_a_request_that_no_turn_can_honour(folder, fails, say):
    say(b"the fox\n")
    assert "max_tokens is 0" in fails("chat", "--model", folder, "-m", 0)


def test_ctrl_c_stops_an_answer_and_not_the_chat(folder, run, say, monkeypatch):
    from afm_mlx.cli import conversation

    def interrupted_once(*args, **kwargs):
        monkeypatch.undo()
        yield from list(stream_generate(*args, **kwargs))[:3]
        raise KeyboardInterrupt

    say(b"the fox\nr\nthe fox\n")
    stdin = sys.stdin
    monkeypatch.setattr(conversation, "stream_generate", interrupted_once)
    status, out, err = main_with_stdin(run, stdin, "chat", "--model", folder, "-m", 12)
    assert status == 0
    assert "Stopped." in err
    assert out.endswith("\n" + answer(folder, "the fox") + "\n")


def main_with_stdin(run, stdin, *argv):
    sys.stdin, kept = stdin, sys.stdin
    try:
        return run(*argv)
    finally:
        sys.stdin = kept


def test_a_model_without_a_chat_template(tmp_path, run, fails, say):
    from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

    folder = tmp_path / "llama"
    write_zoo_folder(folder, "llama", zoo_model("llama", 50, seed=1), word_tokenizer_json(50))
    argv = ("--model", folder)
    status, out, err = run("generate", *argv, "-p", "w2 w3 w4", "-m", 6, "--json")
    assert (status, json.loads(out)["prompt_tokens"]) == (0, 3), err
    assert "the chat template, which is missing" in fails("generate", *argv, "--system-prompt", "x")
    assert "--sliding-window is for AFM" in fails("generate", *argv, "--sliding-window")
    assert "is for AFM models" in fails("generate", *argv, "--prompt-cache-file", "x.safetensors")
    say(b"w2\n")
    assert "no chat template" in fails("chat", *argv)
    chats = lines(tmp_path / "chats.jsonl", example("a", "w2", "w3"))
    assert "no chat template" in fails("evaluate", *argv, "--data", chats)
    assert "no chat template" in fails("perplexity", *argv, "--data-path", chats)
    texts = lines(tmp_path / "texts.jsonl", {"text": "w2 w3 w4"})
    facts = json.loads(run("perplexity", *argv, "--data-path", texts, "--json")[1])
    assert facts["tokens"] == 3  # the last is the end


# -- convert and info


def test_convert(folder, run, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("convert", "--hf-path", folder, "--dtype", "bfloat16")
    assert (status, err) == (0, "")
    assert out.startswith("mlx_model: ")
    assert mx.load("mlx_model/model.safetensors")["model.embedding.weight"].dtype == mx.bfloat16
    assert "exists already" in fails("convert", "--model", folder)
    assert "is no checkpoint" in fails("convert", "--model", tmp_path, "--mlx-path", "other")


def test_info_json(folder, run):
    status, out, err = run("info", "--model", folder, "--json")
    facts = json.loads(out)
    assert (status, err) == (0, "")
    stored = mx.load(str(folder / "model.safetensors"))
    assert facts["weights"]["bytes"] == sum(array.nbytes for array in stored.values())
    assert facts["weights"]["parameters"] == sum(array.size for array in stored.values())
    assert facts["weights"]["bits_per_weight"] == 32
    assert facts["architecture"]["layers_that_write_kv"] == 2
    assert facts["architecture"]["head_dim"] == 8
    assert facts["tokenizer"]["vocab_size"] == load_tokenizer(folder).vocab_size
    model, _ = load(folder)
    cache = model.make_cache()
    model.prefill(mx.zeros((1, 256), mx.int32), cache)
    assert facts["kv_cache"]["bytes_at_full_context"]["float32"] == sum(c.nbytes for c in cache)
    assert len(facts["fingerprint"]) == 64
    assert facts["runtime"]["cpu_gflops_float32"] > 0
    assert facts["runtime"]["versions"]["afm-mlx"] == afm_mlx.__version__


def test_info_says_the_same_in_words(folder, run):
    _, out, _ = run("info", "--model", folder)
    for words in ("layers that write kv", "fingerprint", "bits per weight", "blas", "metal"):
        assert words in out


@pytest.mark.parametrize("preset", list(PRESETS))
def test_info_of_presets(preset, run):
    facts = json.loads(run("info", "--preset", preset, "--json")[1])
    assert facts["architecture"]["parameters"] == PRESETS[preset].num_parameters
    if preset == "afm-3b":
        assert facts["architecture"]["parameters"] == 3_111_368_064
        assert facts["kv_cache"]["bytes_per_token"]["int8"] == 17_920
    assert ("int8" in facts["kv_cache"]["bytes_per_token"]) == (PRESETS[preset].kv_bits == 8)
    assert "weights" not in facts


def test_info_of_other_architectures(tmp_path, run, fails):
    from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

    model = zoo_model("llama", 50, seed=1)
    write_zoo_folder(tmp_path / "llama", "llama", model, word_tokenizer_json(50))
    facts = json.loads(run("info", "--model", tmp_path / "llama", "--json")[1])
    assert facts["model_type"] == "llama"
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert facts["weights"]["parameters"] == count
    assert "config.json is missing" in fails("info", "--model", tmp_path)


def test_packed_weights_are_counted_unpacked(rng):
    import mlx.nn as nn

    from afm_mlx.describe import _count_parameters
    from afm_mlx.weights import StoredTensor

    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False))
    layers.layers[0] = layers.layers[0].to_quantized(32, 4)
    layers.layers[1] = layers.layers[1].to_quantized(64, 2)
    arrays = dict(tree_flatten(layers.parameters()))
    tensors = {n: StoredTensor(n, a.shape, a.dtype, Path("x"), 0) for n, a in arrays.items()}
    values = {"quantization": {"group_size": 32, "bits": 4, "layers.1": {"bits": 2}}}
    assert _count_parameters(tensors, values) == 64 * (32 + 96)


# -- perplexity and evaluate


def lines(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_perplexity(folder, run, fails, tmp_path):
    assert "heldout.jsonl" in fails("perplexity", "--model", folder)
    lines(folder / "heldout.jsonl", *({"text": f"Document {i} of the fox."} for i in range(5)))
    argv = ("perplexity", "--model", folder)
    facts = json.loads(run(*argv, "--json")[1])
    assert facts["samples"] == 5
    assert np.isfinite(facts["perplexity"] + facts["standard_error"] + facts["tokens_per_second"])
    status, out, err = run(*argv, "--data-path", folder / "heldout.jsonl")
    assert (status, err) == (0, "")
    assert f"Perplexity: {facts['perplexity']:.3f} ± {facts['standard_error']:.3f}" in out
    two = [json.loads(run(*argv, "--json", "--num-samples", 2, "--seed", s)[1]) for s in (1, 1, 2)]
    assert two[0]["perplexity"] == two[1]["perplexity"]
    assert two[0]["samples"] == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n{"text"', "d.jsonl:2: this is not JSON"),
        (b'{"text": "a"}\n\n{"words": "b"}', "d.jsonl:3: a document with the keys words"),
        (b'{"text": 5}', "d.jsonl:1: 'text' is a int"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "d.jsonl:1: messages[0]"),
        (b'{"prompt": 1, "completion": "x"}', "d.jsonl:1: messages[0]"),
        (b"5", "d.jsonl:1: a JSON int is no document"),
        (b'{"text": "a"}\n{"text": "\xff"}', "d.jsonl:2: this is not UTF-8"),
        (b"\n\n", "holds no documents"),
    ],
)
def test_bad_documents_are_one_line(folder, fails, tmp_path, content, says):
    file = tmp_path / "d.jsonl"
    file.write_bytes(content)
    assert says in fails("perplexity", "--model", folder, "--data-path", file)


def example(task, question, expected):
    return {"task": task, "messages": [{"role": "user", "content": question}], "answer": expected}


def test_evaluate(folder, run, fails):
    argv = ("evaluate", "--model", folder)
    assert "evaluation.jsonl" in fails(*argv)
    lines(
        folder / "evaluation.jsonl",
        *(example(task, f"What is {i}?", "Nothing.") for i in range(3) for task in ("b", "a")),
    )
    status, out, err = run(*argv, "--show-errors", 2, "--limit", 2)
    assert (status, err) == (0, "")
    assert out.count("expected: 'Nothing.'") == out.count("got:  ") == 2
    table = out[out.index("task") :].splitlines()
    assert [row.split() for row in table] == [
        ["task", "correct", "of", "accuracy"],
        ["b", "0", "2", "0.0%"],
        ["a", "0", "2", "0.0%"],
        ["all", "0", "4", "0.0%"],
    ]
    lines(folder / "heldout.jsonl", {"text": "The fox."})
    facts = json.loads(run(*argv, "--json", "--show-errors", 1, "--batch-size", 2)[1])
    assert facts["overall"] == {"correct": 0, "total": 6, "accuracy": 0.0}
    assert facts["errors"][0]["where"].endswith("evaluation.jsonl:1")
    assert facts["perplexity"]["tokens"] > 2


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"task": "a", "messages": []}, "e.jsonl:1: 'answer' is missing"),
        ({"task": 5, "messages": [], "answer": ""}, "e.jsonl:1: 'task' is int"),
        ([], "e.jsonl:1: this is a JSON list"),
        (example("a", "the fox " * 300, ""), "e.jsonl:1: The prompt needs"),
        ({"task": "a", "messages": [], "answer": ""}, "e.jsonl:1: messages is empty"),
    ],
)
def test_bad_examples_are_one_line(folder, fails, tmp_path, record, says):
    file = lines(tmp_path / "e.jsonl", record)
    assert says in fails("evaluate", "--model", folder, "--data", file)


def test_an_empty_or_missing_test_set_is_one_line(folder, fails, tmp_path):
    file = lines(tmp_path / "e.jsonl")
    assert "holds no examples" in fails("evaluate", "--model", folder, "--data", file)
    assert "can't be read" in fails("evaluate", "--model", folder, "--data", tmp_path / "no.jsonl")

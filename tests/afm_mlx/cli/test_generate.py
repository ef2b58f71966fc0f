"""`afm-mlx generate`: prompts, answers, prompt cache files, and constraints."""

import json
import re
import sys

import mlx.core as mx
import pytest

from afm_mlx.cli import generate as generate_command
from afm_mlx.cli import main
from afm_mlx.cli.chat import loop as chat_lines
from afm_mlx.engine.prompt_cache import save_prompt_cache
from afm_mlx.loading.load import load
from afm_mlx.measure.reward_model import RewardModel
from afm_mlx.measure.rewards import Answered
from tests.tools.cli import answer, example, lines, write_folder
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model
from tests.tools.zoo_chats import write_family_folder


@pytest.fixture
def generate(folder, done):
    """Generate with 12 tokens at most; returns what `--json` says."""

    def generate(prompt, *argv):
        argv = ("generate", "--model", folder, "-p", prompt, "-m", 12, *argv)
        return json.loads(done(*argv, "--json"))

    return generate


def test_it_prints_as_mlx_lm_does(folder, done):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12)
    rule, text = "=" * 10, answer(folder, "A list")
    beginning, _, figures = done(*argv).rpartition(f"\n{rule}\n")
    assert beginning == f"{rule}\n{text}"
    figures = figures.splitlines()
    assert [line.split(":")[0] for line in figures] == ["Prompt", "Generation", "Peak memory"]
    assert "tokens-per-sec" in figures[0]
    assert "Generation: 12 tokens, " in figures[1]
    assert done(*argv, "--verbose", "F") == f"{text}\n"


def test_a_bare_text_is_the_prompt(folder, done, fails):
    argv = ("--model", folder, "-m", 12, "--verbose", "F")
    assert done("generate", "A list", *argv) == f"{answer(folder, 'A list')}\n"
    assert done("generate", *argv) == f"{answer(folder, 'hello')}\n"
    both = fails("generate", "A list", *argv, "-p", "hello")
    assert "TEXT and --prompt both say what the prompt is; choose one" in both


def test_json(folder, generate):
    facts = generate(r"A\n\tlist")
    assert facts["text"] == answer(folder, "A\n\tlist")
    assert len(facts["tokens"]) == facts["generation_tokens"] == 12
    assert facts["finish_reason"] == "length"


def test_a_prompt_from_standard_input(folder, generate, fails, say):
    say("Wörter\nund mehr\r\n".encode())
    assert generate("-")["text"] == answer(folder, "Wörter\nund mehr")
    for data, says in {
        b"\xff\xfe": "not UTF-8",
        b"caf\xc3": "byte 3 is 0xc3",
        b"\n": "empty",
    }.items():
        say(data)
        assert says in fails("generate", "--model", folder, "-p", "-")


def test_standard_input_without_an_end(folder, fails, say, monkeypatch):
    monkeypatch.setattr(generate_command, "MAX_PROMPT_BYTES", 10)
    monkeypatch.setattr(chat_lines, "MAX_BYTES", 10)
    say(b"x" * 11)
    assert "standard input has more than 10 bytes" in fails(
        "generate", "--model", folder, "-p", "-"
    )
    for data in (b"x" * 11, b'"""\n' + b"xx\n" * 9):
        say(data)
        assert "which no context holds" in fails("chat", "--model", folder)


def test_standard_streams_that_are_closed(fails, monkeypatch):
    """A process may be started without them."""
    monkeypatch.setattr(sys, "stdin", None)
    assert "the prompt is empty" in fails("generate", "-p", "-")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
        assert main(["generate", "-p", " "]) == 2


def test_prompt_options(folder, generate):
    _, tokenizer = load(folder)
    chat = tokenizer.apply_chat_template
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be brief."}
    prefilled = [user, {"role": "assistant", "content": "Well, the"}]
    tools = [{"name": "f"}]
    for argv, prompt in [
        (("--ignore-chat-template",), tokenizer.encode("hi", True)),
        (("--system-prompt", "Be brief."), chat([system, user], add_generation_prompt=True)),
        (("--prefill-response", "Well, the"), chat(prefilled, continue_final_message=True)),
        (
            ("--chat-template-config", json.dumps({"tools": tools})),
            chat([user], tools=tools, add_generation_prompt=True),
        ),
    ]:
        assert generate("hi", *argv)["prompt_tokens"] == len(prompt)


def test_stop_and_end_tokens(folder, generate):
    whole = generate("A list")
    text, tokens = whole["text"], whole["tokens"]
    third = load(folder)[1].convert_ids_to_tokens(tokens[2])
    if third.isdigit():  # a number is the id of a token
        third = str(tokens[2])
    ended = generate("A list", f"--extra-eos-token={third}")
    assert ended["finish_reason"] == "stop"
    assert ended["tokens"] == tokens[: ended["generation_tokens"]]
    assert ended["generation_tokens"] <= 3
    stopped = generate("A list", f"--stop={text[4:6]}")
    assert stopped["text"] == text[: text.index(text[4:6])]


def test_sampling_follows_the_seed(generate):
    def sample(seed, *argv):
        return generate("A list", "--temp", 1, "--seed", seed, *argv)["text"]

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1
    for only_the_likeliest in (("--top-k", 1), ("--min-p", 1), ("--top-p", 1e-6)):
        assert sample(5, *only_the_likeliest) == sample(6, *only_the_likeliest)


def test_a_full_context_ends_with_the_text_so_far(folder, generate, fails):
    used = generate("A list")["prompt_tokens"]
    argv = ("generate", "--model", folder, "-p", "A list", "--verbose", "F", "--max-kv-size")
    so_far = answer(folder, "A list", max_tokens=5) + "\n"
    assert f"context of {used + 4} tokens is full" in fails(*argv, used + 4, output=so_far)
    assert "raise --max-kv-size, or ask" in fails(*argv, used - 1)
    window = generate("A list", "--max-kv-size", used + 4, "--sliding-window")
    assert window["generation_tokens"] == 12


def test_what_a_model_refuses_is_one_line(folder, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv, says in {
        "-m 0": "--max-tokens/-m: 0 is out of range",
        "--kv-bits 4": "error: --kv-bits is 4",
        "--kv-bits 8": "--kv-bits is 8",  # a model without scales
        "--adapter-path x": "it is no path, and the model's own adapters are none",
        "--xtc-probability 0.5": "--temp",
        "--temp 1 --top-k 1000": "1000 tokens",
        "--extra-eos-token nosuchpiece": "nosuchpiece",
        "--stop=": "non-empty",
        '--chat-template-config {"tokenize":false}': "can't set tokenize",
        "--ignore-chat-template --system-prompt x": "--system-prompt needs",
        "--ignore-chat-template --prefill-response x": "--prefill-response needs",
        "--prompt-cache-file x.bin": "a .safetensors file is needed",
        "--prompt-cache-file no/folder/x.safetensors": "there is no folder",
        "--prompt-cache-file x.safetensors --sliding-window": "can't be combined",
    }.items():
        assert says in fails("generate", "--model", folder, *argv.split())


def test_a_model_without_a_chat_template(tmp_path, done, fails, say):
    folder = tmp_path / "llama"
    write_zoo_folder(folder, "llama", zoo_model("llama", 50, seed=1), word_tokenizer_json(50))
    argv = ("generate", "--model", folder, "-p", "w2 w3 w4", "-m", 6, "--json")
    assert json.loads(done(*argv))["prompt_tokens"] == 3
    for more, says in {
        ("--system-prompt", "x"): "the chat template, which is missing",
        ("--sliding-window",): "--sliding-window is for AFM",
        ("--prompt-cache-file", "x.safetensors"): "is for AFM models",
    }.items():
        assert says in fails(*argv, *more)
    say(b"w2\n")
    assert "no chat template" in fails("chat", "--model", folder)
    chats = lines(tmp_path / "chats.jsonl", example("a", "w2", "w3"))
    assert "no chat template" in fails("evaluate", "--model", folder, "--data", chats)
    assert "no chat template" in fails("perplexity", "--model", folder, "--data-path", chats)
    texts = lines(tmp_path / "texts.jsonl", {"text": "w2 w3 w4"})
    facts = json.loads(done("perplexity", "--model", folder, "--data-path", texts, "--json"))
    assert facts["tokens"] == 3  # the last is the end


def test_a_chat_template_that_fails_is_one_line(tmp_path, fails):
    folder = write_family_folder(tmp_path / "gemma", "gemma3")
    for template, says in {
        "{{ raise_exception('No roles!') }}": "chat template in {} refuses these messages: No roles!",
        "{{ messages[3].content.x }}": "chat template in {} failed: UndefinedError",
        "{% if %}": "chat template in {} is not valid Jinja: TemplateSyntaxError",
    }.items():
        (folder / "chat_template.jinja").write_text(template)
        says = says.format(folder)
        assert says in fails("generate", "--model", folder, "-p", "x")
        chats = lines(tmp_path / "chats.jsonl", example("a", "w2", "w3"))
        assert says in fails("evaluate", "--model", folder, "--data", chats)
        assert says in fails("perplexity", "--model", folder, "--data-path", chats)


def test_a_prompt_cache_file_saves_what_prompts_begin_with(generate, tmp_path):
    document = "The quick brown fox and the lazy dog, in a long text. " * 3
    prompts = [document + end for end in ("Who is quick?", "Who is lazy?", "Who is quick?", "")]
    alone = [generate(prompt) for prompt in prompts]
    file = tmp_path / "prompt.safetensors"
    assert generate(prompts[0], "--prompt-cache-file", file)["tokens"] == alone[0]["tokens"]
    content = file.read_bytes()
    for prompt, expected in zip(prompts, alone, strict=True):
        cached = generate(prompt, "--prompt-cache-file", file)
        assert cached["tokens"] == expected["tokens"]
        assert cached["prompt_tokens"] < expected["prompt_tokens"] / 2
    assert file.read_bytes() == content


def test_prompt_cache_files_that_do_not_fit(folder, done, fails, tmp_path, spm_bpe, rng):
    file = tmp_path / "prompt.safetensors"
    argv = ("generate", "-m", 2, "--prompt-cache-file", file, "--model")
    done(*argv, folder)
    assert "another model" in fails(*argv, write_folder(tmp_path / "other", spm_bpe, rng))
    model, _ = load(folder)
    cache = model.make_cache(max_size=256)
    model.prefill(mx.array([[1, 2, 3]]), cache)
    for metadata in ({}, *({"tokens": text} for text in ("null", "[1]", "{", "[" * 100_000))):
        save_prompt_cache(file, cache, model, metadata=metadata)
        assert "which tokens" in fails(*argv, folder)
        file.unlink()


KINDS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
import neighbours
from afm_mlx import fm

class Animals:
    @dataclass
    class Animal:
        \"\"\"An animal.\"\"\"
        name: Literal["fox", "dog"]
        friend: Animals.Animal | None = None

@fm.generable
class Generable:
    size: int = fm.guide(range=(7, 7))

@dataclass
class Even:
    number: int

    def __post_init__(self):
        raise ValueError("never even")

broken = bytes
"""
SCHEMA = {
    "title": "Point",
    "description": "Where it is",
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}, "y": {"enum": [3, 44]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "any.json").write_text('{"enum": [null]}', "utf-8-sig")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "kinds.py").write_text(KINDS)
    (tmp_path / "code" / "neighbours.py").write_text("")
    (tmp_path / "constrained_kinds.py").write_text(KINDS.replace("import neighbours", ""))
    (tmp_path / "g.lark").write_text('start: "a" B\nB: /b{2,4}/')
    (tmp_path / "g.gbnf").write_text('root ::= "x" ("y" | "z")')
    return tmp_path


@pytest.fixture
def constrained(folder, done, files):
    """Generate with 40 tokens at most; returns what `--json` says."""

    def constrained(*argv):
        argv = ("generate", "--model", folder, "-p", "A list", "-m", 40, "--seed", 1, *argv)
        return json.loads(done(*argv, "--json"))

    return constrained


@pytest.mark.parametrize("flag", ["--choices", "--stop", "--extra-eos-token"])
def test_a_flag_that_took_the_prompt(flag, fails, done, folder):
    """Such a flag takes all texts after it, and the default prompt would be answered."""
    line = fails("generate", flag, "1", "2", "Is it so?")
    assert f"there is no prompt: {flag} takes all texts after it, 'Is it so?' too" in line
    assert f"before {flag}, or as --prompt TEXT." in line
    for rest in [("-p", "Is it so?", flag, "1", "2"), (flag, "1")]:
        assert done("generate", "--model", folder, *rest)


def test_answers_look_as_they_must(constrained, write_config):
    config = write_config("choices: [a list, B]")
    for argv, pattern in [
        (("--json-schema", "schema.json"), r'\{"x": (1|22), "y": (3|44)\}'),
        (("--json-schema", "any.json"), "null"),
        (("--json-schema", "code/kinds.py:Generable"), r'\{"size": 7\}'),
        (("--regex", r"[a-c]{3}\.", "--temp", 5), r"[a-c]{3}\."),
        (("--choices", "yes", "no, never", "--temp", 5), "yes|no, never"),
        (("--grammar", "g.lark"), "ab{2,4}"),
        (("--grammar", "g.gbnf"), "x[yz]"),
        (("-c", config), "a list|B"),
        (("-c", config, "--regex", "c"), "c"),
    ]:
        facts = constrained(*argv)
        assert re.fullmatch(pattern, facts["text"]), argv
        assert facts["finish_reason"] == "stop"
        assert ("value" in facts) == ("--json-schema" in argv)
        if "value" in facts:
            assert facts["value"] == json.loads(facts["text"])


def test_types_of_files_and_modules(constrained):
    for named in ("code/kinds.py:Animals.Animal", "constrained_kinds:Animals.Animal"):
        # As text, without the schema: the context is small.
        argv = ("--ignore-chat-template", "--at-limit", "complete")
        facts = constrained("--json-schema", named, *argv)
        assert facts["value"]["name"] in ("fox", "dog")
        assert facts["value"].keys() <= {"name", "friend"}


def test_a_chat_shows_the_schema_to_the_model(constrained, folder):
    _, tokenizer = load(folder)
    named = {"name": "Point", "description": "Where it is", "schema": SCHEMA}
    asked = {"type": "json_schema", "json_schema": named}
    message = {"role": "user", "content": "A list", "response_format": asked}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    assert constrained("--json-schema", "schema.json")["prompt_tokens"] == len(prompt)
    plain = constrained("--choices", "a")["prompt_tokens"]
    assert plain < len(prompt)
    as_text = constrained("--json-schema", "schema.json", "--ignore-chat-template")
    assert as_text["prompt_tokens"] < plain


def test_an_answer_that_is_cut_off(folder, done, fails, files):
    argv = ("generate", "--model", folder, "-p", "A list", "--verbose", "F")
    argv = (*argv, "--json-schema", "schema.json", "-m")
    whole = done(*argv, 1, "--at-limit", "complete")
    assert json.loads(whole).keys() == {"x", "y"}
    says = "before its constraint (JSON schema) was met"
    assert says in fails(*argv, 1, output="{\n")
    line = fails(*argv, 1, "--json")
    assert says in line
    assert "Raise --max-tokens, or" in line
    assert "completion with --at-limit complete." in line


def test_what_can_not_be_asked_for_is_one_line(folder, fails, files):
    (files / "list.json").write_text("[1]")
    (files / "broken.json").write_text('{"a"')
    (files / "refused.json").write_text('{"type": "thing"}')
    (files / "raises.py").write_text("1 / 0\n")
    (files / "leaves.py").write_text("raise SystemExit(0)")
    (files / "endless.gbnf").write_text('root ::= root "x"')
    (files / "folder.json").mkdir()
    (files / "latin.json").write_bytes(b'{"const": "\xff"}')
    (files / "large.json").write_text(json.dumps({"const": "x" * 10_000_000}))
    (files / "deep.json").write_text("[" * 100_000)
    asks = "from afm_mlx import fm\n@fm.generable\nclass Bad:\n    size: int = fm.guide(regex='a')"
    (files / "bad_guide.py").write_text(f"{asks}\ndef __getattr__(name): raise ValueError(name)")
    for argv, says in {
        "--regex a --choices b": "--regex and --choices both say what the answer must look like",
        "--json-schema x --grammar b": "--json-schema and --grammar both say",
        "--json-schema nowhere.json": "--json-schema: nowhere.json can't be read",
        "--json-schema folder.json": "--json-schema: folder.json can't be read",
        "--json-schema latin.json": "--json-schema: latin.json can't be read",
        "--json-schema large.json": "Give a smaller schema",
        "--json-schema deep.json": "deep.json is not JSON",
        "--json-schema leaves.py:Animal": "leaves.py can't be run (SystemExit: 0)",
        "--json-schema bad_guide.py:Bad": "bad_guide.py:Bad can't be generated: ",
        "--json-schema bad_guide.py:Good": "bad_guide.py can't be run (ValueError: Good)",
        "--grammar endless.gbnf": "no text follows it",
        "--json-schema list.json": "list.json holds [1]; a JSON schema is an object",
        "--json-schema broken.json": "broken.json is not JSON",
        "--json-schema refused.json": "thing",
        "--json-schema Animal": "module:Class or path/to/file.py:Class is needed",
        "--json-schema nowhere:Animal": "nowhere can't be run (ModuleNotFoundError: ",
        "--json-schema nowhere.py:Animal": "nowhere.py can't be run (FileNotFoundError: ",
        "--json-schema raises.py:Animal": "raises.py can't be run (ZeroDivisionError: ",
        "--json-schema code/kinds.py:Animals.Plant": "code/kinds.py has no Plant",
        "--json-schema code/kinds.py:broken": "The type is bytes",
        "--regex (a": "The regular expression can't be honoured",
        "--choices=": "list of non-empty strings",
        "--grammar g.txt": "a .lark or .gbnf file is needed",
        "--grammar no.lark": "no.lark can't be read",
        "--at-limit complete": "--at-limit needs one of --json-schema, --regex, --choices, --grammar",
        "--choices a --prefill-response x": "--prefill-response can't be combined",
    }.items():
        assert says in fails("generate", "--model", folder, *argv.split())


def test_what_a_types_module_prints_is_no_part_of_the_answer(folder, run, files):
    (files / "speaks.py").write_text("print('Hi')\nfrom typing import Literal\nThree = Literal[3]")
    argv = ("generate", "--model", folder, "--json-schema", "speaks.py:Three", "-p", "A", "--json")
    status, out, err = run(*argv)
    assert (status, json.loads(out)["value"], err) == (0, 3, "Hi\n")


def test_an_answer_that_the_type_itself_refuses(folder, run, files):
    argv = ("generate", "--model", folder, "--json-schema", "code/kinds.py:Even", "--at-limit")
    status, out, err = run(*argv, "complete", "-m", 8)
    assert status == 2
    assert "is no Even: never even" in err
    assert out.startswith("==========\n{")


# -- several samples


@pytest.fixture
def check(tmp_path):
    (tmp_path / "check.py").write_text(
        "def length(prompt, answer, sample):\n    print('seen')\n    return len(answer) / 1000\n"
        "def most(prompt, answer, sample):\n    return 1.0\n"
        "def negative(prompt, answer, sample):\n    return -len(answer)\n"
    )
    return lambda name: f"{tmp_path / 'check.py'}:{name}"


def test_the_best_of_several_samples(folder, run, check):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--temp", 1, "--seed", 4)
    argv += ("--best-of", 6)

    def found(*flags):
        status, out, _ = run(*argv, *flags, "--json")
        assert status == 0
        return json.loads(out)

    shortest = found("--reward", check("negative"))
    lengths = [len(answer) for answer in shortest["answers"]]
    assert shortest["text"] == shortest["answers"][0]
    assert lengths == sorted(lengths)
    assert shortest["weights"] == [-n for n in lengths]
    weighted = found("--verify", check("length"))
    assert sum(weighted["weights"]) == pytest.approx(1)
    assert len(weighted["text"]) == max(lengths)
    first = found("--verify", check("most"), "--select", "first")
    assert first["weights"] == [1]
    assert {*first["answers"]} < {*shortest["answers"]}
    assert len(found()["answers"]) == len(lengths)
    status, out, err = run(*argv, "--verify", check("length"))
    assert status == 0
    assert out.count("=" * 10) == 2
    assert "seen" in err
    assert "No sample passes --verify" in err
    plain = run(*argv, "--verify", check("most"), "--verbose", "F")
    assert plain[1].rstrip("\n") in shortest["answers"]


def test_stepwise_resampling(folder, run, check):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--temp", 1, "--seed", 4)
    flags = ("--smc", 4, "--value", check("most"), "--verify", check("most"), "--json")
    status, out, err = run(*argv, *flags)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert sum(found["weights"]) == pytest.approx(1)
    assert found["log_z"] == 0


def test_several_samples_under_a_schema(folder, run, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "green"]}')
    argv = ("generate", "--model", folder, "-p", "A color", "-m", 12, "--temp", 1, "--seed", 4)
    flags = ("--best-of", 3, "--json-schema", schema, "--verify", "schema", "--json")
    found = json.loads(run(*argv, *flags)[1])
    assert found["value"] in ("red", "green")
    assert found["log_z"] == 0


def test_samples_that_are_refused(folder, fails, check, tmp_path):
    base = ("generate", "--model", folder, "-p", "A list", "-m", 3)
    best, warm = ("--best-of", 2), ("--temp", 1)
    for problem, argv in {
        "--verify needs --best-of N or --smc N": ("--verify", "exact", *warm),
        "--select needs --best-of": ("--select", "best"),
        "at --temp 0 all samples are alike": best,
        "--best-of and --smc both say": (*best, *warm, "--smc", 2),
        "--verify and --reward both say": (*best, *warm, "--verify", "exact", "--reward", "exact"),
        "--smc needs --value": ("--smc", 2, *warm, "--verify", "exact"),
        "--smc needs --value, and --verify": ("--smc", 2, *warm, "--value", check("most")),
        "--value needs --smc": (*best, *warm, "--value", check("most")),
        "--prompt-cache-file is for one": (*best, *warm, "--prompt-cache-file", tmp_path / "c"),
        "needs verify": (*best, *warm, "--select", "best"),
        "verify is -": (*best, *warm, "--verify", check("negative")),
        "raised RewardError (the sample has no text": (*best, *warm, "--verify", "exact"),
    }.items():
        assert problem in fails(*base, *argv)


def test_a_reward_adapter_chooses_among_an_adapters_answers(
    folder, run, make_adapter, reward_adapter
):
    adapter, judge = make_adapter("mine"), reward_adapter
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--temp", 1, "--seed", 4)
    argv += ("--best-of", 3, "--json")
    plain, ours, judged = (
        json.loads(run(*argv, *flags)[1])
        for flags in (
            (),
            ("--adapter-path", adapter),
            ("--adapter-path", adapter, "--reward", judge),
        )
    )
    assert not {*plain["answers"]} & {*ours["answers"]}
    assert {*judged["answers"]} == {*ours["answers"]}
    rewards = RewardModel.load(folder, judge)
    wanted = rewards.of_all([Answered("A list", text) for text in judged["answers"]])
    assert judged["weights"] == pytest.approx(wanted, rel=1e-3)
    assert judged["weights"] == sorted(judged["weights"], reverse=True)

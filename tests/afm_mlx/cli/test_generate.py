"""`afm-mlx generate`, and its prompt cache files."""

import json

import mlx.core as mx

from afm_mlx.engine.generation import stream_generate
from afm_mlx.loading.load import load
from tests.tools.cli import answer, write_folder


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


def test_unusable_standard_input(folder, fails, say):
    for data in [b"\xff\xfe", b"caf\xc3", b"", b"\n"]:
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
    ended = json.loads(run(*argv, f"--extra-eos-token={third}")[1])
    assert ended["finish_reason"] == "stop"
    assert ended["tokens"] == [s.token for s in steps][: ended["generation_tokens"]]
    assert ended["generation_tokens"] <= 3
    text = "".join(s.text for s in steps)
    stopped = json.loads(run(*argv, f"--stop={text[4:6]}")[1])
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


def test_what_a_model_refuses_is_one_line(folder, fails, tmp_path, monkeypatch):
    for argv, says in [
        (["-m", "0"], "max_tokens is 0"),
        (["--kv-bits", "4"], "kv_bits is 4"),
        (["--kv-bits", "8"], "kv_bits is 8"),  # a model without scales
        (["--adapter-path", "x"], "it is no path, and the model's own adapters are none"),
        (["--xtc-probability", "0.5"], "--temp"),
        (["--temp", "1", "--top-k", "1000"], "1000 tokens"),
        (["--extra-eos-token", "nosuchpiece"], "nosuchpiece"),
        (["--stop", ""], "non-empty"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--chat-template-config", '{"tokenize": false}'], "can't set tokenize"),
        (["--ignore-chat-template", "--system-prompt", "x"], "--system-prompt needs"),
        (["--ignore-chat-template", "--prefill-response", "x"], "--prefill-response needs"),
        (["--prompt-cache-file", "x.bin"], "a .safetensors file is needed"),
        (["--prompt-cache-file", "no/folder/x.safetensors"], "there is no folder"),
        (["--prompt-cache-file", "x.safetensors", "--sliding-window"], "can't be combined"),
    ]:
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
    assert "the context holds 3." in fails(*argv, "--max-kv-size", 3)
    file.write_bytes(file.read_bytes()[:-10])
    assert "prompt.safetensors" in fails(*argv)


def test_a_cache_file_that_does_not_say_its_tokens(folder, fails, tmp_path):
    from afm_mlx.engine.prompt_cache import save_prompt_cache

    model, _ = load(folder)
    cache = model.make_cache(max_size=256)
    model.prefill(mx.array([[1, 2, 3]]), cache)
    save_prompt_cache(tmp_path / "c.safetensors", cache, model)
    argv = ("--prompt-cache-file", tmp_path / "c.safetensors")
    assert "which tokens" in fails("generate", "--model", folder, *argv)

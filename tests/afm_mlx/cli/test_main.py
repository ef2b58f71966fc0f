"""What all commands share: help, imports, errors, exit statuses."""

import errno
import io
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
from afm_mlx.cli.arguments import parse
from afm_mlx.loading import resolve
from tests.tools.cases import all_pairs
from tests.tools.cli import ROOT, lines, process, write_folder

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
        # Those that differ on purpose; a prompt that is not given is known by None, and is mlx-lm's; images
        # that are not given are an empty list, and mlx-lm's an empty tuple.
        others = {"model", "extra_eos_token", "num_draft_tokens", "prompt", "image"}
        shared = set(defaults) & set(ours) - others
        assert {k: ours[k] for k in shared} == {k: defaults[k] for k in shared}
        # What is not taken is refused, not ignored.
        for flag in set(defaults) - set(ours):
            assert main([name, "--" + flag.replace("_", "-"), "1"]) == 2
            assert "unrecognized" not in capsys.readouterr().err


def test_the_embedded_model_is_the_default(tmp_path, spm_bpe, rng, monkeypatch, done):
    write_folder(tmp_path / "afm-nano", spm_bpe, rng)
    monkeypatch.setattr(resolve, "_EMBEDDED_FOLDER", tmp_path)
    assert json.loads(done("generate", "--json", "-m", 2))["generation_tokens"] == 2


def test_what_the_user_got_wrong_is_one_line(fails):
    for argv, says in {
        "frobnicate": "frobnicate",
        "generat": "did you mean generate?",
        "adapter conver": "did you mean convert?",
        "generate --model no/such/folder": "There is no folder no/such/folder",
        "chat --pipeline": "mlx.launch",
    }.items():
        assert says in fails(*argv.split())


@pytest.mark.parametrize("argv", [[], ["adapter"]])
def test_a_bare_command_shows_the_help(argv, run):
    assert run(*argv) == run(*argv, "--help")
    assert run(*argv)[0] == 0


def test_run_is_chat_or_generate(monkeypatch):
    called = []
    for command in (chat, generate):
        monkeypatch.setattr(command, "run", called.append)
    for argv, module, model, text in (
        ([], chat, "afm-nano", None),
        (["--temp", "1"], chat, "afm-nano", None),
        (["folder", "--temp", "1"], chat, "folder", None),
        (["folder", "say hello", "--temp", "1"], generate, "folder", "say hello"),
    ):
        assert main(["run", *argv]) == 0
        args = called.pop()
        assert args.command_line.startswith(f"afm-mlx {module.__name__.rpartition('.')[2]}")
        assert (args.model or "afm-nano", getattr(args, "text", None)) == (model, text)
        assert args.temp == (1.0 if "--temp" in argv else parse("chat", chat, []).temp)


def test_a_caller_may_have_replaced_standard_output(monkeypatch, folder):
    outputs = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for name, stream in outputs.items():
        monkeypatch.setattr(sys, name, stream)
    assert main(["generate", "hi", "--model", str(folder), "-m", "2"]) == 0
    assert "tokens" in outputs["stdout"].getvalue()
    assert main(["generate", "--no-such-flag"]) == 2
    assert "--no-such-flag" in outputs["stderr"].getvalue()


def test_a_caller_may_have_replaced_standard_input(monkeypatch, folder, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["generate", "-", "--model", str(folder), "-m", "2"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n"))
    assert main(["chat", "--model", str(folder)]) == 0
    assert "/system" in capsys.readouterr().err


def test_debug_keeps_the_traceback():
    with pytest.raises(afm_mlx.errors.AFMError):
        main(["generate", "--model", "no/such/folder", "--debug"])


def test_an_error_of_the_machine_is_one_line(monkeypatch, fails):
    full = "there is not enough memory"
    for error, says in (
        (MemoryError("Unable to allocate 9 bytes."), f"{full} (Unable to"),
        (MemoryError(), f"{full}. Use"),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), f"{full} ([malloc]"),
        (FileNotFoundError(2, "No such file", "/no/such\nfile"), "No such file"),
    ):
        monkeypatch.setattr(info, "run", Mock(side_effect=error))
        assert says in fails("info")


@pytest.mark.parametrize("defect", [RuntimeError("x"), ValueError("x"), OSError("x")])
def test_our_own_defects_keep_their_traceback(monkeypatch, defect):
    monkeypatch.setattr(info, "run", Mock(side_effect=defect))
    with pytest.raises(type(defect)):
        main(["info"])


def test_exit_status_of_an_interrupt_and_of_code_that_ends_the_process(monkeypatch, run):
    monkeypatch.setattr(info, "run", Mock(side_effect=[KeyboardInterrupt, SystemExit(3)]))
    assert run("info") == (130, "", "afm-mlx: interrupted\n")
    assert run("info")[0] == 3


def test_a_reader_that_has_seen_enough_is_no_error():
    for argv in (["--help"], ["info", "--preset", "afm-3b"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "afm_mlx", *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("argv", "unbuffered", "why"),
    all_pairs(
        [["--help"], ["info", "--preset", "afm-3b"], ["generate", "-m", "2"]],
        ["", "1"],
        ["No space left on device", "it is closed"],
    ),
)
def test_output_that_cannot_be_written_is_one_line(argv, unbuffered, why):
    run = f"[sys.executable, '-m', 'afm_mlx', *{argv}]"
    closed = f"import os, sys; os.close(1); os.execv(sys.executable, {run})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    command = ["-c", closed] if "closed" in why else ["-m", "afm_mlx", *argv]
    with open("/dev/full", "w") as full:
        pipes = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([sys.executable, *command], env=environment, **pipes)
    assert done.returncode == 2
    assert done.stderr.startswith(f"afm-mlx: error: standard output can't be written: {why}.")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_is_one_line(fails, monkeypatch, tmp_path):
    def full(path, *args, **options):
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    lines(tmp_path / "train.jsonl", *[{"prompt": "a", "completion": "b"}] * 3)
    monkeypatch.setattr("afm_mlx.measure.kernel_report.examine", lambda **options: {"ok": True})
    monkeypatch.setattr(Path, "write_text", full)
    report = tmp_path / "report.json"
    said = fails("doctor", "--quick", "--report", report)
    assert f"No space left on device: '{report}'" in said
    run = ("--train", "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "new")
    said = fails("lora", "--model", "afm-nano", "--data", tmp_path / "train.jsonl", *run)
    assert f"No space left on device: '{tmp_path / 'new' / 'run' / 'run.json'}'" in said


def test_commands_in_a_folder_that_is_gone(tmp_path):
    gone = "import os, sys; os.rmdir(os.getcwd()); from afm_mlx.cli import main; sys.exit(main(sys.argv[1:]))"
    for argv, status, says in (
        (["doctor"], 2, "afm-mlx: error: the current folder is gone"),
        (["info", "--preset", "afm-3b"], 0, ""),
    ):
        (tmp_path / "gone").mkdir()
        done = process(*argv, code=gone, cwd=tmp_path / "gone")
        assert (done.returncode, done.stderr.count("\n")) == (status, status // 2), done.stderr
        assert done.stderr.startswith(says)


def test_a_setting_that_cannot_be_used_is_one_line(monkeypatch):
    monkeypatch.setenv("AFM_MLX_KERNELS", "nonsense")
    done = process("generate", "--prompt", "hi")
    assert done.returncode == 2
    assert done.stderr.startswith("afm-mlx: error: AFM_MLX_KERNELS is 'nonsense'")
    assert done.stderr.count("\n") == 1

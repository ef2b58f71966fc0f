"""The scripts that complete commands: all flags are in them, and bash completes with its own."""

import argparse
import re
import shutil
import subprocess

import pytest

from afm_mlx.cli import COMMANDS, main
from tests.tools.arguments import actions_of, commands

CALL = """
source {script}
complete_words() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  $(complete -p afm-mlx | sed 's/.*-F \\([^ ]*\\).*/\\1/') afm-mlx
  echo "${{COMPREPLY[*]}}"
}}
"""


@pytest.fixture(scope="module")
def scripts():
    found = {}
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch:
            lines = []
            patch.setattr("builtins.print", lines.append)
            assert main(["completion", shell]) == 0
        found[shell] = "\n".join(lines)
    return found


def test_scripts_have_every_command_and_every_flag_that_help_shows(scripts):
    for shell, script in scripts.items():
        for name, module in commands().items():
            assert name.split()[-1] in script
            for action in actions_of(module):
                for flag in action.option_strings if action.help != argparse.SUPPRESS else ():
                    written = flag.lstrip("-") if shell == "fish" else flag
                    assert written in script, (shell, name, flag)
    assert "--no-such-flag" not in "".join(scripts.values())


def test_every_shell_that_is_here_reads_its_script(scripts, tmp_path):
    for shell, script in scripts.items():
        if program := shutil.which(shell):
            file = tmp_path / shell
            file.write_text(script)
            done = subprocess.run([program, "-n", str(file)], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, ""), shell


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_actions_flags_choices_and_files(scripts, tmp_path):
    script = tmp_path / "script.bash"
    script.write_text(scripts["bash"])
    (tmp_path / "my-model").mkdir()
    cases = {
        "afm-mlx ''": list(COMMANDS),
        "afm-mlx adapter co": ["compose", "convert"],
        "afm-mlx generate --tem": ["--temp"],
        "afm-mlx convert --q-mode bal": ["balanced"],
        "afm-mlx convert --mlx-path my-": ["my-model"],
        "afm-mlx completion f": ["fish"],
        "afm-mlx adapter convert --t": ["--to"],
        # Adapters by name: the embedded model's or the --model's; then files.
        "afm-mlx chat --adapter-path tri": ["triage"],
        "afm-mlx adapter info red": ["redact"],
        "afm-mlx generate --model my-model --adapter-path ''": ["poet", "my-model", "script.bash"],
        "afm-mlx lora --adapter-path tri": [""],
    }
    (tmp_path / "my-model" / "adapters" / "poet").mkdir(parents=True)
    calls = "".join(f"complete_words {words}\n" for words in cases)
    command = ["bash", "-c", CALL.format(script=script) + calls]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (words, wanted), got in zip(cases.items(), done.stdout.splitlines(), strict=True):
        assert sorted(re.split(" +", got.strip())) == sorted(wanted), words


COMPLETIONS = {
    "fish": 'source {script}; complete -C "afm-mlx generate{model} --adapter-path "',
    "zsh": """
        compdef() {{ }}
        compadd() {{ print -l -- ${{(P)2}} }}
        _files() {{ print -l -- * }}
        source {script}
        words=(afm-mlx generate{model} --adapter-path ''); CURRENT=$#words
        _afm_mlx_adapter_files
    """,
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_other_shells_complete_adapters_by_name(scripts, tmp_path, shell):
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"needs {shell}")
    script = tmp_path / "script"
    script.write_text(scripts[shell])
    (tmp_path / "my-model" / "adapters" / "poet").mkdir(parents=True)
    for model, names in (
        ("", {"redact", "search", "todo", "triage"}),
        (" --model my-model", {"poet"}),
    ):
        call = COMPLETIONS[shell].format(script=script, model=model)
        done = subprocess.run([program, "-c", call], capture_output=True, text=True, cwd=tmp_path)
        found = {line.split("\t")[0].strip("/") for line in done.stdout.splitlines()}
        assert found == names | {"my-model", "script"}, done.stderr

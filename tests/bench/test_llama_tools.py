"""The comparison with llama.cpp's programs, with a stand-in for `llama-perplexity`."""

import sys

import pytest

from bench import llama_tools

# Reads the file as `multiple_choice_score` of llama.cpp's tools/perplexity/perplexity.cpp does.
PERPLEXITY = f"""#!{sys.executable}
import struct, sys
data = open(sys.argv[sys.argv.index("--binary-file") + 1], "rb").read()
(count,) = struct.unpack_from("<I", data)
starts = struct.unpack_from(f"<{{count}}I", data, 4)
def number(at):
    return struct.unpack_from("<I", data, at)[0], at + 4
def text(at):
    size, at = number(at)
    return data[at : at + size].decode(), at + size
at = starts[0]
print("task\\tacc_norm")
for i, start in enumerate(starts):
    assert at == start
    question, at = text(at)
    answers, at = number(at)
    lengths = []
    for _ in range(answers):
        answer, at = text(at)
        lengths.append(len(answer))
    labels = struct.unpack_from(f"<{{answers}}i", data, at)
    other, at = number(at + 4 * answers)
    assert (len(question), lengths, labels, other) == (200, [6] * 4, (1, 0, 0, 0), 0)
    print(f"{{i + 1}}\\t100.0", flush=True)
assert at == len(data)
"""


def test_questions_are_written_as_llama_cpp_reads_them(tmp_path):
    program = tmp_path / "llama-perplexity"
    program.write_text(PERPLEXITY)
    program.chmod(0o755)
    asked = llama_tools.questions(2 * llama_tools.TOGETHER)
    figures = llama_tools.llama_scores(tmp_path, tmp_path / "model.gguf", asked, tmp_path)
    assert figures["questions/s"] > 0
    program.write_text(PERPLEXITY.replace("6] * 4", "5] * 4"))
    with pytest.raises(RuntimeError, match="scored 0 questions"):
        llama_tools.llama_scores(tmp_path, tmp_path / "model.gguf", asked, tmp_path)

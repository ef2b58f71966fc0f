"""The texts for Apple's compiler: every kernel's, complete; and the exit status if one doesn't compile."""

import sys

import mlx.core as mx
import pytest

from afm_mlx.config import PRESETS
from afm_mlx.kernels.metal import runtime
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from tests.metal import texts
from tests.metal.launches import cache_of, record, shapes_only


@pytest.fixture(scope="module")
def found():
    return texts.texts(texts.calls())


def test_every_file_of_a_kernel_is_in_a_text_that_is_whole(found):
    kernels = {name.rpartition("-")[0] for name in found}
    together = "\n".join(found.values())
    for file in runtime.FOLDER.glob("*.metal"):
        assert file.stem in kernels or runtime._read(file.stem) in together, file.name
    for name, text in found.items():
        kernel = name.rpartition("-")[0]
        assert text.startswith(texts.PRELUDE), name
        assert f"custom_kernel_afm_{kernel}" in text.rpartition("[[kernel]]")[2] or (
            f"[[kernel]] void custom_kernel_afm_{kernel}" in text
        ), name
        assert runtime._read(kernel).strip() in text, name


def test_each_file_is_compiled_and_a_refusal_is_the_exit_status(tmp_path, monkeypatch, capsys):
    model = shapes_only(PRESETS["afm-3b"], AFM_RULE, AFM_EMBEDDING_RULE)
    cache = cache_of(model, 100, 256)
    step = record(lambda: model.greedy(mx.zeros((1, 1), mx.int32), cache))
    monkeypatch.setattr(texts, "calls", lambda: step)
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        "import sys\nfrom pathlib import Path\nfile = Path(sys.argv[sys.argv.index('-c') + 1])\n"
        "assert file.read_text().startswith('#include')\n"
        "if '--refuse' in sys.argv and 'vector' in file.name:\n    sys.exit(f'{file.name}: error')\n"
    )
    command = f"{sys.executable} {compiler}"
    assert texts.main([str(tmp_path / "a"), "--compile", "--compiler", command]) == 0
    files = list((tmp_path / "a").glob("*.metal"))
    assert f"{len(files)} compile, 0 don't" in capsys.readouterr().out
    assert texts.main([str(tmp_path / "b"), "--compile", "--compiler", f"{command} --refuse"]) == 1
    said = capsys.readouterr().out
    refused = [file.name for file in files if "vector" in file.name]
    assert refused
    assert all(f"{name}: error" in said for name in refused)
    assert f"{len(files) - len(refused)} compile, {len(refused)} don't" in said

"""How the peers of a model are started, and that the model of each is written once."""

import json

from bench import peer_models
from bench.peer_models import EXACT, INT8, MLX_LM, ONNX, ONNX_LOOKUP, commands
from bench.peer_onnx import Sizes
from bench.peers import MODELS
from tests.tools.cases import each


@each("name", ["afm-3b", "qwen3-4b"])
def test_every_program_is_given_the_same_model(name, tmp_path, monkeypatch, rng):
    written = []
    model = MODELS[name](int(rng.integers(1, 4)))

    def write_folder(folder):
        written.append(folder.name)
        folder.mkdir()

    def write_gguf(path, shapes, body, embedding):
        assert (path.stem, shapes) == (body, model.shapes)
        written.append(path.name)
        path.touch()

    monkeypatch.setattr(peer_models, "write_gguf", write_gguf)
    object.__setattr__(model, "write_folder", write_folder)
    folder = tmp_path / name
    folder.mkdir()
    assert list(commands(model, folder, 3, 700, None)) == [EXACT, INT8, MLX_LM]
    found = commands(model, folder, 3, 700, "python-of-llama")
    assert list(found) == [EXACT, INT8, *(f.peer for f in model.formats), MLX_LM]
    assert written == ["afm-mlx", *dict.fromkeys(f"{f.body}.gguf" for f in model.formats)]
    for format in model.formats:
        command = found[format.peer]
        assert command[0] == "python-of-llama"
        assert command[command.index("--capacity") + 1] == "700"
        assert ("--no-repack" in command) == (not format.repack)


def test_onnxruntime_is_given_the_sizes_of_afm_alone(tmp_path):
    for name in ("afm-3b", "qwen3-4b"):
        model = MODELS[name](3)
        folder = tmp_path / name
        (folder / "afm-mlx").mkdir(parents=True)
        found = commands(model, folder, 3, 700, None, "python-of-onnx")
        if name != "afm-3b":
            assert list(found) == [EXACT, INT8, MLX_LM]
            continue
        assert list(found) == [EXACT, INT8, ONNX, ONNX_LOOKUP, MLX_LM]
        command = found[ONNX]
        assert command[0] == "python-of-onnx"
        assert found[ONNX_LOOKUP] == [*command, "--lookup"]
        sizes = Sizes(**json.loads(command[command.index("--sizes") + 1]))
        assert sizes == (3, 1, 2048, 6656, 256, 153600, model.config["rms_norm_eps"])

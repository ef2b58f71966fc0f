"""lm-eval through our class, our server and mlx-lm's own class: equal scores and answers."""

import json
import math
import os
from types import SimpleNamespace

import lm_eval
import mlx.core as mx
import mlx_lm.models.afm7
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from mlx_lm.evaluate import MLXLM

from afm_mlx.converters.convert import convert
from afm_mlx.errors import DataError
from afm_mlx.measure.harness_model import HarnessModel
from afm_mlx.measure.harness_tasks import find_tasks
from tests.tools.adapters import draw_tensors
from tests.tools.adapters import write_folder as write_adapter
from tests.tools.cases import each
from tests.tools.cli import CONFIG, write_folder
from tests.tools.harness_tasks import write_answers, write_choices
from tests.tools.server import running_server
from tests.tools.zoo_chats import write_family_folder

FAMILIES = {"llama": "llama3", "lfm2": "lfm2"}


def float_folders(kind, place):
    """A folder of floats, and the one for stock mlx-lm.

    Stock mlx-lm always rounds an AFM model's keys and values to int8. Where a number is between two codes, the
    last bit of a sum decides; so the test has the grid of neither.
    """
    if kind != "afm7":
        write_family_folder(place, FAMILIES[kind], kind, max_position_embeddings=4096)
        return place, place
    convert("afm-nano", place, dequantize=True, dtype="float32")
    stock = place.with_name("stock")
    weights = mx.load(str(place / "model.safetensors"))
    stock.mkdir()
    for file in place.glob("*.json"):
        (stock / file.name).write_bytes(file.read_bytes())
    (stock / "chat_template.jinja").write_bytes((place / "chat_template.jinja").read_bytes())
    mx.save_safetensors(str(stock / "model.safetensors"), weights, {"format": "mlx"})
    kept = {name: array for name, array in weights.items() if not name.endswith("_scale")}
    mx.save_safetensors(str(place / "model.safetensors"), kept, {"format": "mlx"})
    (place / "model.safetensors.index.json").unlink()
    (stock / "model.safetensors.index.json").unlink()
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"kv_bits": None}))
    return place, stock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """lm-eval records the machine's packages, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


def answers_of(model, manager, names, is_chat, **options):
    """Log-likelihoods of the first task's choices, the second one's answers, and both tasks' scores."""
    options |= {"apply_chat_template": is_chat, "bootstrap_iters": 0, "torch_random_seed": None}
    found = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, num_fewshot=1, **options
    )
    choices, texts = (found["samples"][name] for name in names)
    likelihoods = [response for sample in choices for (response,) in sample["resps"]]
    return likelihoods, [sample["resps"][0][0].strip() for sample in texts], found["results"]


def prove(kind, place, count, monkeypatch):
    is_chat = kind == "afm7"
    folder, stock = float_folders(kind, place / "MODEL")
    tasks = place / "tasks"
    names = [write_choices(tasks, count), write_answers(tasks, count)]
    manager = find_tasks(names, tasks)
    ours = answers_of(HarnessModel(str(folder)), manager, names, is_chat)
    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.models.afm7, "fake_8bit_quant", lambda x, scale: x)
        model = MLXLM(str(stock), batch_size=1, use_chat_template=is_chat)
        patch.setattr(MLXLM, "tokenizer_name", "stock")
        theirs = [answers_of(model, manager, names, is_chat)]
    with running_server(source=folder, kv="float") as server:
        arguments = {
            "model": "MODEL",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(folder),
            "add_bos_token": not is_chat,
            "max_length": 4096,
        }
        client = "local-completions"
        options = {"model_args": arguments, "batch_size": 16}
        theirs.append(answers_of(client, manager, names, is_chat, **options))
    assert len(ours[0]) == 4 * count
    assert len(ours[1]) == count
    for likelihoods, texts, scores in theirs:
        np.testing.assert_allclose(*zip(*[[a[0], b[0]] for a, b in zip(ours[0], likelihoods)]), 0, 1e-3)  # fmt: skip  # noqa: B905
        assert [a[1] for a in ours[0]] == [b[1] for b in likelihoods]
        assert ours[1] == texts
        assert ours[2] == scores
    return ours


@pytest.mark.parametrize("kind", ["afm7", *FAMILIES])
def test_scores_and_answers_are_those_of_mlx_lm_and_of_the_server(kind, tmp_path, monkeypatch):
    likelihoods, texts, scores = prove(kind, tmp_path, 20, monkeypatch)
    assert len(set(likelihoods)) > 70
    if kind == "afm7":
        assert scores["nano_choices"]["acc,none"] > 0.6
        assert len(set(texts)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["afm7", *FAMILIES])
def test_scores_and_answers_of_200_questions(kind, tmp_path, monkeypatch):
    prove(kind, tmp_path, 200, monkeypatch)

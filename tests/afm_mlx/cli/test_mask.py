"""`--mask`, where a model runs, and masks in `adapter info`, `verify` and `convert`."""

import dataclasses
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.mask_predictor import MaskPredictor, PredictorConfig, small_model
from afm_mlx.adapters.task_mask import MASK_NAME, TaskMask, read_mask, write_mask
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.generation import generate
from afm_mlx.loading.load import load
from afm_mlx.model.model import Model
from tests.tools.cli import example, lines
from tests.tools.masks import draw_mask
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

LIST = [{"role": "user", "content": "A list"}]


@pytest.fixture
def mask(folder, fingerprint, tmp_path, rng):
    group = load(folder)[0].layers[0].mlp.gate_proj.weight.shape[0] // 4
    options = {"task": "lists", "base_model_fingerprint": fingerprint}
    write_mask(tmp_path / "mask", draw_mask(load(folder)[0], rng, 0.5, group=group, **options))
    return tmp_path / "mask"


@pytest.fixture
def scratch(folder):
    def scratch(**options):
        model, tokenizer = load(folder, **{k: str(v) for k, v in options.items()})
        prompt = tokenizer.apply_chat_template(LIST, add_generation_prompt=True)
        return generate(model, tokenizer, prompt, max_tokens=12)

    return scratch


def test_commands_run_it(folder, mask, make_adapter, scratch, done, fails, chat, tmp_path):
    adapter = make_adapter("adapter")
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--json")
    shutil.copytree(mask, folder / "adapters" / "listed")
    alone, both = scratch(mask=mask), scratch(mask=mask, adapter_path=adapter)
    assert len({scratch(), scratch(adapter_path=adapter), alone, both}) == 4
    assert scratch(adapter_path=mask) == alone
    for given, wanted in (
        (("--mask", mask), alone),
        (("--mask", "listed"), alone),
        (("--adapter-path", mask), alone),
        (("--mask", mask, "--adapter-path", adapter), both),
    ):
        assert json.loads(done(*argv, *given))["text"] == wanted
    best = done(*argv, "--mask", mask, "--adapter-path", adapter, "--best-of", 2, "--temp", 1)
    assert json.loads(best)["text"]
    says = fails(*argv, "--mask", "nothing")
    assert "There is no task mask 'nothing'" in says
    assert "the model's own adapters are listed" in says
    assert "holds no task mask" in fails(*argv, "--mask", adapter)
    assert "has a task mask, and" in fails(*argv, "--adapter-path", mask, "--mask", mask)

    data = lines(tmp_path / "texts.jsonl", {"text": "A list of names and what they are for."})
    argv = ("perplexity", "--model", folder, "--data-path", data, "--json")
    facts = [json.loads(done(*argv, *more)) for more in ((), ("--mask", mask))]
    assert facts[0]["perplexity"] != pytest.approx(facts[1]["perplexity"], rel=1e-3)


@pytest.mark.usefixtures("quick")
def test_evaluate_and_bench(folder, mask, done, fails, tmp_path):
    data = lines(tmp_path / "test.jsonl", example("a", "A list", "one"))
    argv = ("evaluate", "--model", folder, "--data", data, "--show-errors", 1)
    answers = [
        done(*argv, *more).partition("got: ")[2].splitlines()[0] for more in ((), ("--mask", mask))
    ]
    assert answers[0] != answers[1]
    assert "--mask is for one model" in fails(
        "evaluate", "--compare", folder, folder, "--data", data, "--mask", mask
    )
    argv = ("bench", "--model", folder, "-p", 4, "-g", 3, "--num-trials", 1, "--output", "json")
    plain, masked = (json.loads(done(*argv, *more)) for more in ((), ("--mask", mask)))
    read = [r["results"][0]["bytes_per_token"] for r in (plain, masked)]
    assert read[1] < read[0]
    assert "leave out" in fails(*argv, "--mask", mask, "--adapter-rank", 2)


def test_masks_that_do_not_fit(folder, mask, fails):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 2)
    whole = read_mask(mask)
    write_mask(mask, TaskMask(whole.kept, whole.group, base_model_fingerprint="0" * 64))
    assert "was made for the model with fingerprint" in fails(*argv, "--mask", mask)
    write_mask(mask, TaskMask(np.ones((4, 2), bool), whole.group))
    assert "feed-forwards of" in fails(*argv, "--mask", mask)
    write_mask(mask, whole)
    path = mask / MASK_NAME
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut off or damaged" in fails(*argv, "--mask", mask)
    save_file(path, {"kept": _flipped(whole)})
    assert "was edited or damaged" in fails(*argv, "--mask", mask)


def test_verify_compares_the_fingerprint_of_a_model_of_mlx_lm(done, run, rng, tmp_path):
    for name, seed in (("own", 1), ("other", 2)):
        write_zoo_folder(
            tmp_path / name, "llama", zoo_model("llama", 64, seed), word_tokenizer_json(64)
        )
    model = load(tmp_path / "own")[0]
    wanted = base_model_fingerprint(model)
    mask = draw_mask(model, rng, 0.5, base_model_fingerprint=wanted)
    write_mask(tmp_path / "mask", mask)
    argv = ("adapter", "verify", tmp_path / "mask", "--model")
    assert "is a whole task mask" in done(*argv, tmp_path / "own")
    status, out, _ = run(*argv, tmp_path / "other")
    assert status == 2
    assert f"was made for the model with fingerprint {wanted}" in out
    write_mask(tmp_path / "mask", dataclasses.replace(mask, base_model_fingerprint=None))
    assert "is a whole task mask" in done(*argv, tmp_path / "other")


def _flipped(mask):
    return mx.array(np.packbits(mask.kept[::-1] ^ mask.kept, axis=1, bitorder="little"))


def test_adapter_info_verify_and_convert(folder, mask, make_adapter, done, run, fails, tmp_path):
    facts = json.loads(done("adapter", "info", mask, "--json"))
    assert facts["format"] == "mask"
    assert facts["mask"]["task"] == "lists"
    assert 0 < facts["mask"]["kept_share"] < 1
    assert "kept share" in done("adapter", "info", mask)
    assert "is a whole task mask that keeps" in done("adapter", "verify", mask, "--model", folder)
    both = make_adapter("both")
    write_mask(both, read_mask(mask))
    assert json.loads(done("adapter", "info", both, "--json"))["mask"] == facts["mask"]
    assert "with a task mask that keeps" in done("adapter", "verify", both, "--model", folder)
    write_mask(both, TaskMask(np.ones((3, 2), bool), 8))
    status, out, _ = run("adapter", "verify", both, "--model", folder)
    assert status == 2
    assert "the mask is for 3 blocks of 16 channels" in out
    signed = ("adapter", "verify", both, "--model", folder, "--base-signature", "0" * 40)
    out = run(*signed)[1]
    assert all(f"wrong: {each}" in out for each in ("the mask is for 3 blocks", "only .fmadapter"))
    (both / MASK_NAME).unlink()
    out = run(*signed)[1]
    assert all(words in out for words in (f"{MASK_NAME} is missing", "wrong: only .fmadapter"))
    out = run("adapter", "verify", mask, "--base-signature", "0" * 40)[1]
    assert "wrong: only .fmadapter packages have a base signature" in out
    write_mask(both, read_mask(mask))
    argv = ("adapter", "convert", both, "--model", folder)
    done(*argv, "--to", "mlx-lm", "--output", tmp_path / "copy")
    assert read_mask(tmp_path / "copy").fingerprint == read_mask(mask).fingerprint
    says = fails(*argv, "--to", "peft", "--output", tmp_path / "peft")
    assert "has a task mask, which only a folder of mlx-lm's format keeps" in says


def test_a_chat_begins_with_it(mask, make_adapter, scratch, chat):
    adapter = make_adapter("adapter")
    for options in ({"mask": mask}, {"mask": mask, "adapter_path": adapter}):
        flags = [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]
        assert chat("A list", flags=flags)[0] == scratch(**options) + "\n"


def test_a_chat_runs_chosen_masks_with_the_adapter(
    folder, make_adapter, scratch, chat, monkeypatch, tmp_path
):
    adapter, (model, tokenizer) = make_adapter("adapter"), load(folder)
    blocks, width = model.args.num_layers, model.args.ffn_dim
    config = PredictorConfig(blocks, width, width // 2, group=width // 4)
    predictor = MaskPredictor(Model(small_model(model.args)), config, seed=1).eval()
    monkeypatch.setattr("afm_mlx.loading.load.load_predictor", lambda *_: predictor)
    monkeypatch.setattr("afm_mlx.loading.load.check_predictor", lambda _: None)
    prompt = tokenizer.apply_chat_template(LIST, add_generation_prompt=True)
    write_mask(tmp_path / "chosen", predictor.task_mask([prompt]))
    wanted = scratch(mask=tmp_path / "chosen", adapter_path=adapter)
    assert wanted not in (scratch(adapter_path=adapter), scratch(mask=tmp_path / "chosen"))
    flags = ("--mask", "auto", "--adapter-path", adapter)
    assert chat("A list", flags=flags)[0] == wanted + "\n"

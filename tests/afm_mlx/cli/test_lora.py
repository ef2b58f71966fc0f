"""`afm-mlx lora`: adapters, full training, and mlx-lm's way of asking for them."""

import dataclasses
import json

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.config import PRESETS
from afm_mlx.loading.load import load
from tests.tools.cli import CONFIG, write_folder
from tests.tools.training_runs import random_adapter

DRAFT = dataclasses.replace(CONFIG, num_layers=1, num_kv_reuse_layers=0)
SHORT = ("--iters", 3, "--batch-size", 2, "--max-seq-length", 96)
FRESH = ("--draft-preset", "afm-3b-draft")


pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def folder(trainable_folder):
    return trainable_folder


def test_an_adapter_in_mlx_lms_words(folder, data, run, tmp_path):
    out = tmp_path / "adapters"
    config = tmp_path / "lora.yaml"
    config.write_text(
        "train: true\nfine_tune_type: lora\noptimizer: adamw\nnum_layers: 2\n"
        'lora_parameters:\n  rank: 4\n  scale: 10.0\n  dropout: 0.1\n  keys: ["mlp.up_proj"]\n'
    )
    base = ("lora", "--model", folder, "--data", data, *SHORT)
    status, text, err = run(*base, "-c", config, "--adapter-path", out, "--test")
    assert (status, err) == (0, "")
    assert f"Saved to {out}\n" in text
    at = [text.index(line) for line in ("Testing without the adapter", "Iter 0: Val loss",
                                        "Testing what was trained", "Test loss ")]  # fmt: skip
    assert at == sorted(at)
    tensors, adapter = load_adapter(out)
    assert (adapter.rank, adapter.scale, adapter.dropout) == (4, 10.0, pytest.approx(0.1))
    assert {name.rpartition(".")[0] for name in tensors} == {
        "model.layers.1.mlp.up_proj",
        "model.kv_reuse_layers.0.mlp.up_proj",
    }
    assert (out / "run" / "metrics.jsonl").is_file()
    assert run("generate", "--model", folder, "--adapter-path", out, "-p", "say x", "-m", 2)[0] == 0
    # The next one starts from it.
    later = ("--initial-adapter", out, "--adapter-path", tmp_path / "later")
    assert run(*base, *later)[0] == 0
    assert load_adapter(tmp_path / "later")[0].keys() == tensors.keys()


def manifest(path):
    return json.loads((path / "run.json").read_text())


def test_a_preset_is_less_than_a_file_and_more_than_the_defaults(folder, data, run, tmp_path):
    chats = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(chats * 2)
    base = ("lora", "--model", folder, "--data", data, "--max-seq-length", 96)
    out = tmp_path / "toolkit"
    assert run(*base, "--preset", "toolkit", "--adapter-path", out)[0] == 0
    found = manifest(out / "run")
    epoch = found["iters"] / 2
    assert (
        found
        | {
            "rank": 32,
            "scale": 0.5,
            "learning_rate": 1e-3,
            "warmup_iters": epoch,
            "schedule": "cosine",
            "final_learning_rate": 0,
            "batch_size": 4,
            "grad_accumulation_steps": 1,
            "clip_grad_norm": 1,
            "weight_decay": 0.01,
            "num_layers": -1,
        }
        == found
    )
    assert (epoch, found["packing"]) == (5, False)  # of 18 samples
    config = tmp_path / "lora.yaml"
    config.write_text(
        "preset: toolkit\nlora_parameters: {rank: 8, scale: 3.0}\nbatch_size: 2\nweight_decay: 0\n"
        "iters: 20\nwarmup_iters: 1\n"
    )
    other = tmp_path / "other"
    own = ("--batch-size", 3, "--rank", 4, "--iters", 4)
    assert run(*base, "-c", config, *own, "--adapter-path", other)[0] == 0
    found = manifest(other / "run")
    assert (
        found
        | {
            "rank": 4,
            "scale": 3,
            "iters": 4,
            "warmup_iters": 1,
            "batch_size": 3,
            "weight_decay": 0,
            "learning_rate": 1e-3,
        }
        == found
    )
    plain = tmp_path / "plain"
    assert run(*base, *SHORT, "--adapter-path", plain)[0] == 0
    found = manifest(plain / "run")
    assert (found["rank"], found["scale"], found["weight_decay"]) == (16, 0.5, 0)


def test_the_command_line_comes_before_a_file_in_other_words_too(
    folder, data, run, fails, tmp_path
):
    config = tmp_path / "lora.yaml"
    config.write_text("iters: 50\nwarmup_iters: 9\nscale: 3.0\nschedule: constant\n")
    base = ("lora", "--model", folder, "--data", data, "--batch-size", 2, "--max-seq-length", 96)
    own = ("--epochs", 1, "--warmup-epochs", 0.5, "--alpha", 8, "--rank", 4)
    assert run(*base, "-c", config, *own, "--adapter-path", tmp_path / "epochs")[0] == 0
    found = manifest(tmp_path / "epochs" / "run")
    assert 1 < found["iters"] < 10
    assert found["warmup_iters"] == -(-found["iters"] // 2)
    assert (found["scale"], found["schedule"]) == (2, "constant")
    rate = {"name": "cosine_decay", "arguments": [0.01, 2]}
    own = ("--iters", 1, "--lr-schedule", json.dumps(rate), "--preset", "toolkit")
    assert run(*base, "-c", config, *own, "--adapter-path", tmp_path / "rate")[0] == 0
    found = manifest(tmp_path / "rate" / "run")
    assert (found["lr_schedule"], found["rank"], found["scale"]) == (rate, 32, 3)
    config.write_text("iters: 1\nepochs: 1\n")
    assert "both say how long to train" in fails(*base, "-c", config)


def test_a_yaml_file_of_mlx_lm(folder, data, run, tmp_path):
    """Every key that its example has, and those that its defaults have."""
    first, out = tmp_path / "first", tmp_path / "second"
    base = ("lora", "--data", data, "--max-seq-length", 96)
    assert run(*base, "--model", folder, "--rank", 3, "--iters", 1, "--adapter-path", first)[0] == 0
    config = tmp_path / "lora.yaml"
    config.write_text(
        f"model: {folder}\ntrain: true\nfine_tune_type: lora\noptimizer: adam\n"
        "optimizer_config:\n  adam:\n    betas: [0.8, 0.95]\n    eps: 1e-6\n  adamw: {}\n"
        "seed: 3\nnum_layers: -1\nbatch_size: 2\niters: 3\nval_batches: 25\nlearning_rate: 1e-5\n"
        f"steps_per_report: 1\nsteps_per_eval: 1\nresume_adapter_file: {first}/adapters.safetensors\n"
        f"adapter_path: {out}\nsave_every: 2\ntest: true\ntest_batches: 1\n"
        "grad_checkpoint: false\ngrad_accumulation_steps: 1\nclear_cache_threshold: 0\n"
        "mask_prompt: true\ntrust_remote_code: false\nreport_to: null\nproject_name: null\n"
        "lr_schedule:\n  name: cosine_decay\n  warmup: 2\n  warmup_init: 1e-7\n"
        "  arguments: [1e-2, 10, 1e-7]\n"
    )
    status, text, err = run(*base, "-c", config)
    assert (status, err) == (0, "")
    found = manifest(out / "run")
    assert (found["rank"], found["betas"], found["eps"]) == (3, [0.8, 0.95], 1e-6)
    rates = [line.split("Learning Rate ")[1].split(",")[0] for line in text.splitlines()
             if "Learning Rate" in line]  # fmt: skip
    assert [float(rate) for rate in rates] == pytest.approx([1e-7, 5e-3, 1e-2], rel=1e-2)
    assert "Without the adapter: loss " in text


def test_an_adapter_is_tested_without_training(folder, data, run, fails, tmp_path):
    out = tmp_path / "adapter"
    base = ("lora", "--model", folder, "--data", data, "--adapter-path", out)
    status, text, _ = run(*base, *SHORT, "--train", "--test", "--learning-rate", 0.01, "--json")
    assert status == 0
    trained = json.loads(text)["test"]
    assert trained["trained"]["loss"] < trained["untrained"]["loss"]
    assert trained["trained"]["tokens"] == trained["untrained"]["tokens"] > 0
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, text, _ = run(*base, *SHORT, "--test", "--json")
    tested = json.loads(text)
    assert status == 0
    for kind in ("trained", "untrained"):
        assert tested["test"][kind]["loss"] == pytest.approx(trained[kind]["loss"], rel=1e-2)
    status, text, err = run(*base, *SHORT, "--test")
    assert (status, err) == (0, "")
    loss, before = (tested["test"][kind]["loss"] for kind in ("trained", "untrained"))
    assert f"Test loss {loss:.3f}, Test ppl " in text
    assert f"Without the adapter: loss {before:.3f}, ppl " in text
    assert files == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, text, _ = run(*base[:-1], "", *SHORT, "--test")
    assert f"Test loss {before:.3f}, " in text
    (data / "test.jsonl").unlink()
    assert "has no test.jsonl" in fails(*base, *SHORT, "--test")


def test_a_draft_model(folder, data, run, tmp_path, spm_bpe, rng):
    draft = write_folder(tmp_path / "small", spm_bpe, rng, DRAFT)
    out = tmp_path / "draft"
    adapter = random_adapter(folder, tmp_path / "adapter", rng)
    base = ("lora", "--data", data, *SHORT)
    arguments = ("--fine-tune-type", "draft", "--teacher", folder, "--teacher-adapter", adapter)
    status, text, err = run(
        *base, "--model", draft, *arguments, "--save-path", out, "--train", "--test"
    )
    assert (status, err) == (0, "")
    found = manifest(tmp_path / "draft-run")
    assert (found["divergence"], found["schedule"], found["kind"]) == (
        "reverse",
        "constant",
        "draft",
    )
    assert "The target keeps " in text
    assert load(out)[0].args.num_layers == 1
    status, text, _ = run(
        *base[:-6], "--batch-size", 2, "--max-seq-length", 96, "--model", draft, *arguments,
        "--save-path", tmp_path / "preset", "--preset", "toolkit",
    )  # fmt: skip
    assert status == 0
    found = manifest(tmp_path / "preset-run")
    epoch = found["iters"] // 2
    assert (found["warmup_iters"], found["schedule"], found["weight_decay"]) == (
        epoch, "constant", 0.01
    )  # fmt: skip


def test_a_draft_model_from_random_weights(folder, data, run, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "afm-3b-draft", DRAFT)
    out = tmp_path / "draft"
    arguments = ("--fine-tune-type", "draft", *FRESH, "--teacher", folder, "--save-path", out)
    rate = json.dumps({"name": "exponential_decay", "arguments": [0.01, 0.9]})
    own = ("--seed", 7, "--lr-schedule", rate, "--json")
    status, text, _ = run("lora", "--data", data, *SHORT, *arguments, *own)
    assert (status, json.loads(text)["model"]) == (0, "afm-3b-draft")
    found = manifest(tmp_path / "draft-run")
    assert (found["model"], found["lr_schedule"]) == ("afm-3b-draft", json.loads(rate))
    model, tokenizer = load(out)
    assert (model.args.num_layers, model.args.kv_bits) == (1, None)
    assert tokenizer.get_vocab() == load(folder)[1].get_vocab()
    assert run("generate", "--model", out, "-p", "say x", "-m", 2)[0] == 0


def test_a_file_that_all_is_trained_on_is_no_test(folder, data, fails, tmp_path):
    base = ("lora", "--model", folder, "--data", data / "train.jsonl", *SHORT)
    out = ("--adapter-path", tmp_path / "adapter")
    assert "there is nothing to test" in fails(*base, "--train", "--test", *out)
    assert not (tmp_path / "adapter").exists()


def test_data_under_other_names(folder, run, tmp_path):
    rows = [{"question": "say a", "answer": "a", "prompt": 3}, {"question": "say b", "answer": "b"}]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("--prompt-feature", "question", "--completion-feature", "answer")
    base = ("lora", "--model", folder, "--data", data, *SHORT)
    assert run(*base, *names, "--adapter-path", tmp_path / "named")[0] == 0
    data.write_text(json.dumps({"chat": [{"role": "user", "content": "say a"},
                                         {"role": "assistant", "content": "a"}]}))  # fmt: skip
    named = ("--chat-feature", "chat", "--text-feature", "words")
    assert run(*base, *named, "--adapter-path", tmp_path / "chat")[0] == 0


def test_a_recovery_adapter(folder, data, run, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "recovery"
    assert run("convert", "--model", folder, "--mlx-path", packed, "-q")[0] == 0
    arguments = ("--teacher", folder, "--rank", 8, "--alpha", 16, "--adapter-path", out, "--json")
    status, text, err = run("lora", "--model", packed, "--data", data, *SHORT, *arguments)
    assert status == 0
    losses = [float(line.split("Val loss ")[1]) for line in err.splitlines() if "Val loss" in line]
    assert losses[-1] < losses[0]
    assert json.loads(text)["best_step"] == 3
    assert load_adapter(out)[1].scale == 2.0


def test_full_training(folder, data, run, tmp_path):
    out = tmp_path / "full"
    arguments = ("--fine-tune-type", "full", "--save-path", out, "--num-layers", 1)
    assert run("lora", "--model", folder, "--data", data, *SHORT, *arguments)[0] == 0
    before, after = (load(path)[0].model.kv_reuse_layers[0] for path in (folder, out))
    assert not mx.array_equal(before.mlp.up_proj.weight, after.mlp.up_proj.weight)
    assert (tmp_path / "full-run" / "run.json").is_file()


def test_wrong_arguments(folder, data, fails, tmp_path, monkeypatch):
    for arguments, message in [
        (("--fine-tune-type", "dora"), "allowed are lora, full and draft"),
        (("--fine-tune-type", "full"), "--save-path is missing"),
        (("--fine-tune-type", "full", "--save-path", "x", "--rank", 4), "--rank would do nothing"),
        (
            ("--fine-tune-type", "full", "--save-path", "x", "--adapter-path", "y"),
            "--adapter-path would do nothing",
        ),
        (("--save-path", "x"), "is for full and draft"),
        (("--fine-tune-type", "draft", "--save-path", "x"), "--teacher is missing"),
        (("--fine-tune-type", "draft", "--teacher", "x"), "--save-path is missing"),
        (
            (*"--fine-tune-type draft --teacher x --save-path x".split(), *FRESH),
            "both are given, choose one",
        ),
        (FRESH, "--draft-preset is for --fine-tune-type draft"),
        (
            ("--fine-tune-type", "full", "--save-path", "x", "--preset", "toolkit"),
            "--preset toolkit is for lora and draft",
        ),
        (("--preset", "apple"), "choose from"),
        (("--iters", 3, "--epochs", 1), "both say how long to train; choose one"),
        (("--scale", 0), "an adapter of scale 0 learns nothing"),
        (("--preset", "toolkit", "--iters", 3), "A warm-up of 1 epochs is"),
        (("--teacher-adapter", "x"), "--teacher-adapter without --teacher"),
        (("--distillation-divergence", "reverse"), "without --teacher would do nothing"),
        (("--warmup-iters", 1, "--warmup-epochs", 1), "choose one"),
        (("--test-batches", 0), "--test-batches is 0; allowed are 1 and more"),
        (("--optimizer", "muon"), "choose from"),
        (("--optimizer", "adam", "--weight-decay", 0.1), "adam has no weight decay"),
        (("--optimizer-config", '{"adamw": {"nesterov": true}}'), "allowed are betas"),
        (("--optimizer-config", '{"adamw": {"betas": [0.9]}}'), "a list of two numbers"),
        (("--optimizer-config", '{"adamw": {"betas": [0.9, 1]}}'), "betas is (0.9, 1)"),
        (("--optimizer-config", '{"adamw": {"weight_decay": "x"}}'), "weight_decay are one each"),
        (("--optimizer-config", '{"adamw": 5}', "--preset", "toolkit"), "has 5 for adamw"),
        (("--clear-cache-threshold", "much"), "'much' is no size"),
        (("--report-to", "wandb"), "nothing is sent to wandb"),
        (("--save-dtype", "bfloat16"), "choose from"),
        (("--adapter-path", ""), "--adapter-path is empty"),
        (
            ("--initial-adapter", "x", "--resume-adapter-file", "y"),
            "both say where to start; choose one",
        ),
        (("--test", "--fine-tune-type", "full"), "--test alone measures an adapter"),
        (("--test", "--teacher", "x"), "--teacher would do nothing"),
        (("--test",), "There is no adapter adapters to test"),
        (("--alpha", 4, "--scale", 2), "both say how strong the adapter is; choose one"),
        (("--keys", "mlp.nothing"), "There is no layer mlp.nothing"),
        (("--num-layers", 9), "num_layers of LoRA is 9"),
        (("--lora-parameters", '{"r": 4}'), "known are rank, scale, dropout, keys"),
        (("--lora-parameters", '{"rank": 0}'), "rank is 0; allowed are 1 to 65536"),
        (("--rank", 100_000), "rank is 100000; allowed are 1 to 65536"),
        (("--lora-parameters", '{"rank": "4"}'), "rank is '4'; int is needed"),
        (("--initial-adapter", "nowhere"), "nowhere is no folder"),
        (("--resume-adapter-file", "x"), "x is no folder"),
        (("--rank", 0), "allowed is 1 or more"),
        (("--lr-schedule", "x"), "can't be used as JSON"),
        (("--lr-schedule", "{}"), "lr_schedule: name is None"),
        (("--lr-schedule", "{}", "--warmup-iters", 2), "both say what the learning rate does"),
    ]:
        monkeypatch.chdir(tmp_path)
        assert message in fails("lora", "--model", folder, "--data", data, *SHORT, *arguments)
        assert not (tmp_path / "adapters").exists()


def test_more_than_the_machine_has_memory_for(folder, data, fails, tmp_path, monkeypatch):
    """Said before a run is begun: nothing is in the way of the next try."""
    from afm_mlx.training.methods import training_memory as memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 10**4)
    argv = ("--data", data, *SHORT, "--adapter-path", tmp_path / "a")
    assert "this machine has 0.0" in fails("lora", "--model", folder, *argv)
    assert not (tmp_path / "a").exists()


def test_values_without_measure(folder, data, fails, tmp_path):
    for argv in [
        ("--max-seq-length", 10**14),
        ("--batch-size", 10**6),
        ("--epochs", 1e300),
        ("--clear-cache-threshold", "9" * 400),
        ("--lora-parameters", '{"keys": [1, 2]}'),
        ("--optimizer-config", '{"adamw": {"eps": 1' + "0" * 400 + "}}"),
        ("--lora-parameters", '{"dropout": 2}'),
        ("--lr-schedule", '{"name": "cosine_decay", "arguments": [1e-3, 0]}'),
        ("--lr-schedule", '{"name": "cosine_decay", "arguments": [1' + "0" * 400 + "]}"),
    ]:
        path = tmp_path / "a"
        line = fails("lora", "--model", folder, "--data", data, "--adapter-path", path, *argv)
        assert len(line) < 1200
        assert not path.exists()

"""`afm-mlx lora` from its arguments to what it saves and prints."""

import dataclasses
import json

import pytest

from afm_mlx.adapters.adapter_folder import EmbeddingUse, RewardUse, load_adapter
from afm_mlx.adapters.task_mask import read_mask
from afm_mlx.config import PRESETS
from afm_mlx.loading.load import load
from tests.tools.cli import CONFIG, lines, write_folder
from tests.tools.tokenizers import docstrings
from tests.tools.training_runs import random_adapter
from tests.tools.vision_data import SEEING, write_image_data

SHORT = ("--iters", 3, "--batch-size", 2, "--max-seq-length", 96)


@pytest.fixture
def base(trainable_folder, data):
    return ("lora", "--model", trainable_folder, "--data", data, *SHORT)


def test_an_adapter_is_trained_tested_and_trained_further(base, done, write_config, tmp_path):
    out, config = (
        tmp_path / "adapters",
        write_config(
            "train: true\nfine_tune_type: lora\noptimizer: adamw\nnum_layers: 2\n"
            'lora_parameters:\n  rank: 4\n  scale: 10.0\n  dropout: 0.1\n  keys: ["mlp.up_proj"]\n'
        ),
    )
    text = done(*base, "-c", config, "--adapter-path", out, "--test")
    lines = ["Testing without the adapter", "Iter 0: Val loss", "Testing what was trained"]
    at = [text.index(line) for line in (*lines, "Test loss ", f"Saved to {out}\n")]
    assert at == sorted(at)
    tensors, adapter = load_adapter(out)
    assert (adapter.rank, adapter.scale, adapter.dropout) == (4, 10.0, pytest.approx(0.1))
    assert {name.rpartition(".")[0] for name in tensors} == {
        "model.layers.1.mlp.up_proj",
        "model.kv_reuse_layers.0.mlp.up_proj",
    }
    assert (out / "run" / "metrics.jsonl").is_file()
    done("generate", "--model", base[2], "--adapter-path", out, "-p", "say x", "-m", 2)
    later = tmp_path / "later"
    done(*base, "--initial-adapter", out, "--adapter-path", later)
    assert load_adapter(later)[0].keys() == tensors.keys()


def test_an_adapter_is_tested_without_training(base, data, run, done, fails, tmp_path):
    base = (*base, "--adapter-path", tmp_path / "adapter")
    status, text, _ = run(*base, "--train", "--test", "--learning-rate", 0.01, "--json")
    assert status == 0
    trained = json.loads(text)["test"]
    assert trained["trained"]["loss"] < trained["untrained"]["loss"]
    assert trained["trained"]["tokens"] == trained["untrained"]["tokens"] > 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    tested = json.loads(done(*base, "--test", "--json"))["test"]
    loss, before = (tested[kind]["loss"] for kind in ("trained", "untrained"))
    assert loss == pytest.approx(trained["trained"]["loss"], rel=1e-2)
    assert before == pytest.approx(trained["untrained"]["loss"], rel=1e-2)
    text = done(*base, "--test")
    assert f"Test loss {loss:.3f}, Test ppl " in text
    assert f"Without the adapter: loss {before:.3f}, ppl " in text
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert f"Test loss {before:.3f}, " in done(*base[:-1], "", "--test")
    (data / "test.jsonl").unlink()
    assert "has no test.jsonl" in fails(*base, "--test")


def test_an_adapter_for_embeddings(trainable_folder, run, done, tmp_path):
    words = [word for word in docstrings().split() if word.isalpha()][:40]
    for split, chosen in (("train", words), ("valid", words[:6]), ("test", words[:9])):
        records = [{"query": f"find {word}", "positive": f"here {word} is"} for word in chosen]
        lines(tmp_path / f"{split}.jsonl", *records)
    base = ("lora", "--model", trainable_folder, "--data", tmp_path, "--objective", "contrastive")
    base += ("--adapter-path", tmp_path / "out", "--iters", 3, "--batch-size", 8)
    own = ("--pool", "mean", "--instruction", "Find it", "--chunk-rows", 5)
    text = done(*base, *own, "--train", "--test", "--learning-rate", 0.01)
    for line in (
        "Train data: 40 pairs, ",
        "Batches: 8 pairs, texts of up to ",
        ", Val recall@1 ",
        "Trained Pairs 24, ",
        ", over 9 pairs\nWithout the adapter: loss ",
        f"Saved to {tmp_path / 'out'}\n",
    ):
        assert line in text
    assert "ppl" not in text
    assert load_adapter(tmp_path / "out")[1].embedding == EmbeddingUse("mean", "Find it")
    # The pooling and the instruction are the adapter's.
    status, text, _ = run(*base, "--test", "--json")
    assert status == 0
    tested = json.loads(text)["test"]
    assert tested["trained"].keys() == {"loss", "recall_at_1", "pairs"}
    said = done(*base, "--test")
    assert f"Test loss {tested['trained']['loss']:.3f}, Test recall@1 " in said
    assert f"Without the adapter: loss {tested['untrained']['loss']:.3f}, recall@1 " in said


def test_a_reward_model(trainable_folder, done, fails, tmp_path, rng):
    good, bad = (["the fox"] * 2, ["a dog"] * 2)
    for split, count in (("train", 16), ("valid", 4), ("test", 4)):
        records = [
            {"prompt": f"say {i}", "chosen": " ".join(good), "rejected": " ".join(bad)}
            | ({"strength": "better", "grades": {"chosen": {"verbosity": 2}}} if i % 2 else {})
            for i in range(count)
        ]
        lines(tmp_path / f"{split}.jsonl", *records)
    base = ("lora", "--model", trainable_folder, "--data", tmp_path, "--objective", "reward")
    base += ("--adapter-path", tmp_path / "out", "--iters", 4, "--batch-size", 4, "--rank", 4)
    text = done(*base, "--train", "--test", "--learning-rate", 0.02, "--best-by", "accuracy")
    for line in (
        "Train data: 16 pairs, ",
        " 8 graded answers",
        ", Val accuracy ",
        "Trained Pairs 16, ",
        "Best: Val accuracy 100.0% after step 4",
        ", over 4 pairs\nWithout the adapter: loss ",
        f"Saved to {tmp_path / 'out'}\n",
    ):
        assert line in text
    assert load_adapter(tmp_path / "out")[1].reward == RewardUse(("verbosity",))
    assert "Test accuracy 100.0%" in done(*base, "--test")
    # Held-out pairs, and answers.
    argv = ("evaluate", "--model", trainable_folder, "--reward", tmp_path / "out", "--data")
    table = done(*argv, tmp_path / "test.jsonl").splitlines()
    assert table[2] == f"Data: {tmp_path / 'test.jsonl'} (4 pairs)"
    assert [row.split()[:-1] for row in table[3:6]] == [
        ["strength", "pairs", "accuracy", "mean"],
        ["not", "given", "2", "100.0%"],
        ["better", "2", "100.0%"],
    ]
    assert table[6].startswith("Accuracy: 100.0% (95 %: ")
    assert table[7].startswith("Grades of verbosity: ")
    facts = json.loads(done(*argv, tmp_path / "test.jsonl", "--json", "--limit", 3))
    assert (facts["pairs"], facts["accuracy"], len(facts["margins"])) == (3, 1.0, 3)
    assert facts["grades"]["verbosity"]["answers"] == 1
    answers = [{"prompt": "say 1", "answer": text} for text in ("the fox the fox", "a dog a dog")]
    file = lines(tmp_path / "answers.jsonl", *answers)
    rewards = json.loads(done(*argv, file, "--json"))["rewards"]
    assert rewards[0] > rewards[1]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = lines(tmp_path / "tools.jsonl", *({**each, "tools": tools} for each in answers))
    assert json.loads(done(*argv, with_tools, "--json"))["rewards"] != rewards
    assert f"from {min(rewards):.3f} to {max(rewards):.3f}" in done(*argv, file)
    # What can't be honoured.
    assert "--data is missing" in fails(*argv[:-1])
    assert "--adapter-path is of no use with --reward" in fails(*argv, file, "--adapter-path", "a")
    assert "--judge needs --pairwise" in fails(*argv, file, "--judge", "a")
    assert "no reward adapter" in fails(
        *argv[:-2], random_adapter(trainable_folder, tmp_path / "plain", rng), "--data", file
    )
    for flags, says in [
        (("--objective", "next-token", "--grade-weight", 1), "--grade-weight would do nothing"),
        (
            ("--pool", "mean"),
            "--pool would do nothing with --objective reward; it is for contrastive",
        ),
        (("--no-mask-prompt",), "--no-mask-prompt is of no use with --objective reward"),
        (("--teacher", "afm-nano"), "teacher would do nothing"),
    ]:
        assert says in fails(*base[:-6], "--adapter-path", tmp_path / "b", *flags)


def test_an_adapter_by_preferences(trainable_folder, run, done, tmp_path):
    words = [word for word in docstrings().split() if word.isalpha()][:20]
    for split, chosen in (("train", words), ("valid", words[:6]), ("test", words[:5])):
        records = [{"prompt": f"say {w}", "chosen": w, "rejected": f"{w} {w} {w}"} for w in chosen]
        lines(tmp_path / f"{split}.jsonl", *records)
    base = ("lora", "--model", trainable_folder, "--data", tmp_path, "--objective", "dpo")
    base += ("--adapter-path", tmp_path / "out", "--iters", 3, "--beta", 0.2)
    own = ("--train", "--test", "--learning-rate", 0.01, "--best-by", "margin")
    text = done(*base, *own)
    for line in (
        "Train data: 20 pairs, ",
        "Batches: 4 pairs, packed rows of up to ",
        "Computing the reference's log-probabilities of 20 pairs (train)\n",
        "Iter 0: Val loss 0.693, Val margin 0.000, Val accuracy 0.0%, Val chosen -",
        "Trained Pairs 12, ",
        "Best: Val margin ",
        ", over 5 pairs\nWithout the adapter: loss 0.693, margin 0.000, accuracy 0.0%, chosen -",
        f"Saved to {tmp_path / 'out'}\n",
    ):
        assert line in text
    status, text, _ = run(*base, "--test", "--json")
    assert status == 0
    tested = json.loads(text)["test"]
    names = {"loss", "margin", "accuracy", "chosen", "rejected", "length", "kl", "pairs"}
    assert tested["trained"].keys() == names
    assert tested["untrained"]["margin"] == 0


def test_a_draft_model_from_random_weights(base, done, tmp_path, rng, monkeypatch):
    small = dataclasses.replace(CONFIG, num_layers=1, num_kv_reuse_layers=0)
    monkeypatch.setitem(PRESETS, "afm-3b-draft", small)
    _, _, teacher, *data = base
    adapter = random_adapter(teacher, tmp_path / "adapter", rng)
    draft = ("--fine-tune-type", "draft", "--draft-preset", "afm-3b-draft", "--teacher", teacher)
    out = tmp_path / "draft"
    own = ("--teacher-adapter", adapter, "--save-path", out, "--train", "--test")
    assert "The target keeps " in done("lora", *data, *draft, *own)
    found = json.loads((tmp_path / "draft-run" / "run.json").read_text())
    assert (found["divergence"], found["kind"]) == ("reverse", "draft")
    model, tokenizer = load(out)
    assert model.args.num_layers == 1
    assert tokenizer.get_vocab() == load(teacher)[1].get_vocab()
    done("generate", "--model", out, "-p", "say x", "-m", 2)


def test_a_model_with_a_predictor_of_masks(base, data, done, fails, tmp_path):
    for file in data.glob("*.jsonl"):  # texts have no prompt
        kept = [line for line in file.read_text().splitlines() if "text" not in json.loads(line)]
        file.write_text("\n".join(kept) + "\n")
    first, second, mask = (tmp_path / name for name in ("first", "second", "mask"))
    kind = ("--fine-tune-type", "ifp", "--train")
    own = ("--ifp-stage", "chunk", "--chunk-size", 8, "--ffn", 0.5, "--group", 8)
    own += ("--predictor-rank", 4, "--mask-temperature", 0.5, "--binary-masks")
    text = done(*base, *kind, *own, "--save-path", first)
    for says in ("masks\n", "soft share", "overlap"):
        assert says in text
    _, _, _, *others = base
    done("lora", "--model", first, *others, *kind, "--save-path", second)
    run = json.loads((tmp_path / "second-run" / "run.json").read_text())
    assert run["stage"] == "prompt"
    assert "group=8, rank=4, temperature=0.5, binary=True" in run["predictor"]
    prune = ("prune", "--model", second, "--criterion", "predictor", "--save-path", mask)
    assert "Kept 50.0% of " in done(*prune, "--task", "You are an expert in words.")
    assert read_mask(mask).task == "You are an expert in words."
    answer = ("generate", "--model", second, "-p", "say x", "-m", 4, "--verbose", False)
    texts = {done(*answer, "--mask", each) for each in ("auto", mask)}
    assert all(texts)
    for argv, says in (
        (
            (*answer, "--mask", "auto", "--prompt-cache-file", "x.safetensors"),
            "--mask auto can't be combined",
        ),
        (("generate", "-p", "x", "--mask", "auto"), "has no predictor of masks"),
        ((*base, *kind), "--save-path is missing"),
        ((*base, *kind, "--rank", 4, "--save-path", mask), "--rank would do nothing"),
        ((*base, "--ffn", 0.5), "--ffn would do nothing with --fine-tune-type lora"),
        (prune, "needs --task or --data"),
        (
            (*prune, "--task", "x", "--ffn", 0.5),
            "--ffn would do nothing with --criterion predictor",
        ),
    ):
        assert says in fails(*argv)


def test_more_than_the_machine_has_memory_for(base, fails, tmp_path, monkeypatch):
    """Said before a run is begun: nothing is in the way of the next try."""
    from afm_mlx.training.methods import training_memory as memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 10**4)
    assert "this machine has 0.0" in fails(*base, "--adapter-path", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_parts_of_a_model_that_takes_images(spm_bpe, done, fails, tmp_path, rng):
    eyes = write_folder(tmp_path / "eyes", spm_bpe, rng, SEEING)
    data = write_image_data(tmp_path / "images", rng)
    base = ("lora", "--model", eyes, "--data", data, "--train", *SHORT)
    out = tmp_path / "adapter"
    done(*base, "--train-parts", "text, adaptor", "--adapter-path", out)
    tensors, _ = load_adapter(out)
    assert {name.split(".")[0] for name in tensors} == {"model", "vision"}
    refused = fails(*base, "--train-parts", "eyes", "--adapter-path", tmp_path / "other")
    assert "train_parts is eyes; allowed are text, adaptor, encoder" in refused

"""Each kind of training end to end: what is trained, what is saved, and what is refused."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.errors import CheckpointError, ConfigError, DataError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.events import Report, Stepped, Validation
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.mean_loss import mean_loss
from afm_mlx.training.loop.run_folder import RunExistsError
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.data_splits import read_data
from afm_mlx.training.methods.full_training import FullTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.qat_training import QATTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.scores import measure_adapter
from afm_mlx.training.methods.train import train_full, train_lora, train_qat
from tests.tools.cli import write_folder
from tests.tools.compare import changed
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import OPTIONS, Watcher, parameters, random_adapter
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def test_full_training(recipe, model, tmp_path):
    watcher = Watcher()
    result = train_full(
        dataclasses.replace(recipe, test=True), tmp_path / "full", **watcher.hooks()
    )
    before, after = parameters(model), parameters(tmp_path / "full")
    fixed = {name for name in before if name.endswith(("key_scale", "value_scale"))}
    assert len(fixed) == 4
    assert changed(before, after) == set(before) - fixed
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    assert result.outcome.best_loss == min(losses)
    assert len(watcher.losses(Stepped, "loss")) == 6
    assert watcher.losses(Report, "step") == [6]
    plan = watcher.plan
    assert plan.parameters == TRAINABLE.num_parameters + len(fixed)
    assert plan.trainable == plan.parameters - len(fixed)
    assert plan.memory > 16 * plan.trainable
    assert len(plan.data.train) == 9
    assert 0 < plan.data.train.n_targets < plan.data.train.n_tokens
    card = (tmp_path / "full" / "README.md").read_text()
    assert f"| validation loss | {result.outcome.best_loss:.4f} |\n" in card
    assert f"| test cross-entropy | {result.test_loss:.4f} nats a token |\n" in card
    assert str(tmp_path) not in card
    tokenizers = [load(folder)[1] for folder in (model, tmp_path / "full")]
    assert tokenizers[0].encode("a word") == tokenizers[1].encode("a word")
    assert result.run_path == tmp_path / "full-run"


def test_full_training_of_the_last_blocks(recipe, model, tmp_path):
    train_full(recipe, tmp_path / "full", FullTraining(num_layers=1))
    names = changed(parameters(model), parameters(tmp_path / "full"))
    assert names
    assert all(name.startswith("model.kv_reuse_layers.0.") for name in names)
    with pytest.raises(ConfigError, match="num_layers is 4; allowed are 1 to 3"):
        train_full(recipe, tmp_path / "other", FullTraining(num_layers=4))
    assert not (tmp_path / "other-run").exists()


def test_lora_on_a_packed_model_with_a_teacher(recipe, model, packed, tmp_path):
    watcher = Watcher()
    recipe = dataclasses.replace(recipe, model=packed, teacher=model)
    train_lora(recipe, tmp_path / "adapter", LoRATraining(rank=4), **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert 0 < losses[-1] < losses[0]
    tensors, config = load_adapter(tmp_path / "adapter")
    assert (config.rank, config.scale) == (4, 0.5)
    assert config.base_model_fingerprint == folder_fingerprint(TRAINABLE, packed)
    assert all(mx.abs(tensor).max() > 0 for tensor in tensors.values())
    tokens = mx.array([[5, 6, 7]])
    adapted = load(packed, adapter_path=str(tmp_path / "adapter"))[0](tokens)
    assert not mx.allclose(adapted, load(packed)[0](tokens), atol=1e-3)
    assert watcher.plan.trainable == sum(tensor.size for tensor in tensors.values())
    scales = 2 * TRAINABLE.num_kv_layers
    assert watcher.plan.parameters == (TRAINABLE.num_parameters + scales + watcher.plan.trainable)


def test_a_task_adapter_starts_from_a_recovery_adapter(recipe, model, tmp_path, rng):
    base, first = load(model)[0], tmp_path / "first"
    add_lora(base, 4, 2.0, ["mlp.up_proj"])
    drawn = [
        (name, mx.array(rng.normal(0, 0.1, array.shape).astype(np.float32)))
        for name, array in tree_flatten(base.trainable_parameters())
    ]
    base.load_weights(drawn, strict=False)
    save_lora(base, first, model)
    tiny = dataclasses.replace(recipe.options, learning_rate=1e-7)
    recipe = dataclasses.replace(recipe, options=tiny)
    method = LoRATraining(initial_adapter=first, save_dtype="float32")
    train_lora(recipe, tmp_path / "second", method)
    (before, old), (after, new) = load_adapter(first), load_adapter(tmp_path / "second")
    assert old == new
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, atol=1e-5)
    with pytest.raises(ConfigError, match="rank is 8, and that of the initial adapter"):
        train_lora(recipe, tmp_path / "third", LoRATraining(rank=8, initial_adapter=first))
    add_lora(stranger := load(model)[0], 4, 2.0)
    stranger.model.output_norm.weight *= 2
    save_lora(stranger, tmp_path / "stranger")
    with pytest.raises(CheckpointError, match="was made for the model with fingerprint"):
        train_lora(recipe, tmp_path / "x", LoRATraining(initial_adapter=tmp_path / "stranger"))
    forced = LoRATraining(initial_adapter=tmp_path / "stranger", force=True)
    one_step = dataclasses.replace(recipe, options=dataclasses.replace(tiny, iters=1))
    train_lora(one_step, tmp_path / "x", forced)
    assert load_adapter(tmp_path / "x")[1].base_model_fingerprint == old.base_model_fingerprint


def test_an_adapter_may_start_from_one_of_the_arrays_in_memory(
    recipe, model, tmp_path, monkeypatch
):
    # As on a GPU, where they are not the folder's: its float32 numbers are rounded.
    monkeypatch.setattr("afm_mlx.loading.load.activation_dtype", lambda: mx.bfloat16)
    base = add_lora(load(model)[0], 4, 2.0, ["mlp.up_proj"])
    save_lora(base, tmp_path / "first")
    fingerprint = load_adapter(tmp_path / "first")[1].base_model_fingerprint
    assert fingerprint != folder_fingerprint(TRAINABLE, model)
    recipe = dataclasses.replace(recipe, options=TrainingOptions(iters=1, learning_rate=1e-3))
    method = LoRATraining(initial_adapter=tmp_path / "first")
    train_lora(recipe, tmp_path / "second", method)
    assert load_adapter(tmp_path / "second")[1].rank == 4


@pytest.mark.parametrize("initial", [False, True])
def test_the_test_split_is_measured_with_and_without_the_adapter(
    recipe, packed, tmp_path, rng, initial
):
    recipe = dataclasses.replace(recipe, model=packed, test=True)
    first = random_adapter(packed, tmp_path / "first", rng) if initial else None
    method = LoRATraining(initial_adapter=first)
    result = train_lora(recipe, tmp_path / "adapter", method)
    # The folder is measured anew, by the kernels that generation runs.
    again = measure_adapter(recipe, result.path)
    assert result.test.untrained.loss == pytest.approx(again.untrained.loss, rel=1e-4)
    assert result.test.trained.loss == pytest.approx(again.trained.loss, rel=1e-2)
    assert result.test.label == "without the adapter"
    assert result.test_loss == result.test.trained.loss
    assert result.test.trained.tokens == again.trained.tokens > 0
    assert result.test_loss < result.test.untrained.loss
    assert result.test_perplexity == pytest.approx(np.exp(result.test_loss))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_an_adapter_with_nan_is_no_start(recipe, model, tmp_path, rng, bad):
    adapter = random_adapter(model, tmp_path / "first", rng)
    tensors, config = load_adapter(adapter)
    name = str(rng.choice(sorted(tensors)))
    tensors[name][0, 0] = bad
    save_adapter(tmp_path / "bad", tensors, config)
    method = LoRATraining(initial_adapter=tmp_path / "bad")
    with pytest.raises(CheckpointError, match=f"bad: {name} holds NaN or infinity"):
        train_lora(recipe, tmp_path / "out", method)
    assert not (tmp_path / "out").exists()


def test_a_scale_that_teaches_nothing():
    for scale in [0, -1, np.inf, np.nan, 1e39]:
        with pytest.raises(ConfigError, match=r"scale is .*finite numbers over 0"):
            LoRATraining(scale=scale)


def test_ranks_that_no_adapter_has():
    for rank in [0, -1, 100_000, 2.0]:
        with pytest.raises(ConfigError, match=r"rank is .*allowed are 1 to 65536"):
            LoRATraining(rank=rank)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_adapter_is_saved_in_16_bits_and_its_run_in_32(recipe, tmp_path, dtype):
    method = LoRATraining(save_dtype=dtype)
    result = train_lora(recipe, tmp_path / "adapter", method)
    saved = mx.load(str(result.path / "adapters.safetensors"))
    best = mx.load(str(result.run_path / "best" / "trainable.safetensors"))
    assert saved.keys() == best.keys()
    for name, array in best.items():
        assert array.dtype == mx.float32
        assert saved[name].dtype == {"float16": mx.float16, "float32": mx.float32}[dtype]
        assert mx.array_equal(saved[name], array.astype(saved[name].dtype))
    with pytest.raises(ConfigError, match="save_dtype is 'int8'; allowed are 'float16' and"):
        LoRATraining(save_dtype="int8")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_tested_are_the_numbers_that_are_saved(model, rng, dtype):
    adapted = add_lora(load(model)[0], 3, 1.0)
    drawn = {
        name: mx.array(rng.normal(size=array.shape).astype(np.float32))
        for name, array in lora_tensors(adapted).items()
    }
    adapted.load_weights(list(drawn.items()), strict=False)
    LoRATraining(save_dtype=dtype).round_as_saved(adapted)
    for name, array in lora_tensors(adapted).items():
        rounded = np.array(drawn[name]).astype(dtype).astype(np.float32)
        assert array.dtype == mx.float32
        assert np.array_equal(array, rounded)


def test_numbers_beyond_float16_ask_for_float32(recipe, model, tmp_path, rng):
    first = random_adapter(model, tmp_path / "first", rng, size=1e-3)
    tensors = dict(mx.load(str(first / "adapters.safetensors")))
    name = str(rng.choice(sorted(tensors)))
    # The other half of the pair is zero, so that the layer still adds nothing.
    pair = name.replace("lora_a", "lora_x").replace("lora_b", "lora_a").replace("lora_x", "lora_b")
    tensors = {n: mx.array(np.array(a)) for n, a in tensors.items()}
    tensors[pair] = mx.zeros_like(tensors[pair])
    tensors[name] = mx.full(tensors[name].shape, 7e4)
    mx.save_safetensors(str(first / "adapters.safetensors"), tensors)
    tiny = TrainingOptions(iters=1, learning_rate=1e-9)
    recipe = dataclasses.replace(recipe, options=tiny)
    method = LoRATraining(initial_adapter=first)
    with pytest.raises(TrainingError, match=r"has a number of 70000, .*--save-dtype float32"):
        train_lora(recipe, tmp_path / "adapter", method)
    assert not (tmp_path / "adapter" / "adapters.safetensors").exists()
    wide = dataclasses.replace(method, save_dtype="float32")
    train_lora(recipe, tmp_path / "adapter", wide, resume=True)
    assert mx.load(str(tmp_path / "adapter" / "adapters.safetensors"))[name].max() == 7e4


@pytest.mark.parametrize("rank", [1, 64, 100])
def test_ranks(recipe, packed, tmp_path, rank):
    recipe = dataclasses.replace(
        recipe, model=packed, options=dataclasses.replace(OPTIONS, iters=1)
    )
    train_lora(recipe, tmp_path / "adapter", LoRATraining(rank=rank, scale=16 / rank))
    tensors, config = load_adapter(tmp_path / "adapter")
    assert (config.rank, config.scale) == (rank, 16 / rank)
    assert {a.shape[1] for n, a in tensors.items() if "lora_a" in n} == {rank}


def test_qat_saves_a_packed_model(recipe, tmp_path):
    watcher = Watcher()
    recipe = dataclasses.replace(recipe, test=True, options=dataclasses.replace(OPTIONS, iters=12))
    result = train_qat(recipe, tmp_path / "qat", QATTraining(calibrate_kv=2), **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    model = load(tmp_path / "qat")[0]
    linear = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert {(m.bits, m.mode, m.granularity) for m in linear} == {(2, "balanced", "tensor")}
    embedding = model.model.embedding
    assert isinstance(embedding, PackedEmbedding)
    assert (embedding.bits, embedding.granularity) == (4, "row")
    # The folder's loss is that of the weights that were trained.
    tested = read_data(recipe, ModelSource.open(tmp_path / "qat")).test
    assert mean_loss(model, CrossEntropy(), tested) == pytest.approx(result.test_loss, rel=1e-2)
    assert watcher.plan.options.ema_decay == pytest.approx(1 - 10 / 12)


def test_qat_gives_scales_to_a_model_without(recipe, model, tmp_path):
    values = json.loads((model / "config.json").read_text()) | {"kv_bits": None}
    weights = {
        n: a for n, a in mx.load(str(model / "model.safetensors")).items() if "quant_" not in n
    }
    (model / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(model / "model.safetensors"), weights)
    (model / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="stores keys and values as floats"):
        train_qat(recipe, tmp_path / "qat", QATTraining(learn_kv_scales=True))
    method = QATTraining(calibrate_kv=2, learn_kv_scales=True, average=False)
    train_qat(recipe, tmp_path / "qat", method)
    assert load(tmp_path / "qat")[0].args.kv_bits == 8


def test_qat_of_a_model_of_the_zoo(tmp_path, rng):
    model = zoo_model("llama", 96, int(rng.integers(1 << 30)))
    write_zoo_folder(tmp_path / "zoo", "llama", model, word_tokenizer_json(96))
    data = tmp_path / "train.jsonl"
    rows = [{"text": " ".join(f"w{i}" for i in rng.integers(2, 96, 20))} for _ in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(
        data, OPTIONS, tmp_path / "zoo", batch_size=2, max_seq_length=64, teacher="self"
    )
    rule = QuantizationRule(4, "affine", "group", 32)
    train_qat(recipe, tmp_path / "qat", QATTraining(rule=rule, embedding_rule=rule))
    from mlx_lm import load as load_by_mlx_lm

    tokens = mx.array([[5, 6, 7]])
    theirs, ours = load_by_mlx_lm(str(tmp_path / "qat"))[0], load(tmp_path / "qat")[0]
    np.testing.assert_allclose(theirs(tokens), ours(tokens), atol=1e-2)
    with pytest.raises(ConfigError, match="no int8 scales"):
        train_qat(recipe, tmp_path / "other", QATTraining(calibrate_kv=1))
    with pytest.raises(ConfigError, match="--no-packing"):
        train_qat(dataclasses.replace(recipe, packing=True), tmp_path / "other")


@pytest.mark.parametrize("kind", ["full", "qat"])
def test_a_quantized_model_has_no_float_weights_to_train(recipe, packed, tmp_path, kind):
    train = {"full": train_full, "qat": train_qat}[kind]
    with pytest.raises(ConfigError, match=r"is quantized, and .* afm-mlx convert --model .* -d"):
        train(dataclasses.replace(recipe, model=packed), tmp_path / "out")


def test_a_resumed_run_saves_the_same_adapter(recipe, model, packed, tmp_path, rng):
    rates = {"name": "cosine_decay", "arguments": [1e-2, 4], "warmup": 2, "warmup_init": 1e-4}
    options = dataclasses.replace(
        OPTIONS,
        iters=4,
        lr_schedule=rates,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        clear_cache_threshold=0,
    )
    recipe = dataclasses.replace(
        recipe,
        model=packed,
        options=options,
        packing=False,
        teacher=model,
        teacher_adapter=random_adapter(model, tmp_path / "teachers", rng),
        divergence="reverse",
        distillation_weight=0.5,
        test=True,
    )
    first = random_adapter(packed, tmp_path / "first", rng, rank=3)
    method = LoRATraining(dropout=0.2, initial_adapter=first, save_dtype="float32")
    unbroken = train_lora(recipe, tmp_path / "unbroken", method)

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_lora(recipe, tmp_path / "broken", method, on_event=interrupt)
    resumed = train_lora(recipe, tmp_path / "broken", method, resume=True)
    assert resumed.test == unbroken.test
    one, two = (
        (tmp_path / name / "adapters.safetensors").read_bytes() for name in ("unbroken", "broken")
    )
    assert one == two


def test_a_resumed_run_saves_the_same_folder(recipe, tmp_path):
    options = dataclasses.replace(OPTIONS, iters=4, grad_accumulation_steps=2)
    recipe = dataclasses.replace(recipe, options=options)
    train_qat(recipe, tmp_path / "unbroken")

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_qat(recipe, tmp_path / "broken", on_event=interrupt)
    assert not (tmp_path / "broken").exists()
    with pytest.raises(TrainingError, match="--resume"):
        train_qat(recipe, tmp_path / "broken")
    other = dataclasses.replace(recipe, batch_size=3)
    with pytest.raises(TrainingError, match="batch_size was 2 and is now 3"):
        train_qat(other, tmp_path / "broken", resume=True)
    train_qat(recipe, tmp_path / "broken", resume=True)
    one, two = parameters(tmp_path / "unbroken"), parameters(tmp_path / "broken")
    assert not changed(one, two)


def test_an_adapter_is_not_overwritten(recipe, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainingError, match="holds an adapter already"):
        train_lora(recipe, tmp_path / "adapter")
    (tmp_path / "killed" / "run").mkdir(parents=True)
    (tmp_path / "killed" / "run" / "run.json").write_text("{}")
    (tmp_path / "killed" / "adapters.safetensors").touch()  # and no config yet
    with pytest.raises(RunExistsError, match=r"Resume it \(--resume\)"):
        train_lora(recipe, tmp_path / "killed")


def test_a_teacher_must_be_of_use(recipe, model, tmp_path, spm_unigram, rng):
    with pytest.raises(ConfigError, match="nothing to learn"):
        train_lora(dataclasses.replace(recipe, teacher=model), tmp_path / "adapter")
    other = write_folder(tmp_path / "other", spm_unigram, rng, TRAINABLE)
    with pytest.raises(ConfigError, match="different vocabularies"):
        train_lora(dataclasses.replace(recipe, teacher=other), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_bad_data_is_named_before_a_model_is_loaded(recipe, model, tmp_path):
    (model / "model.safetensors").unlink()
    with (tmp_path / "data" / "valid.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "king", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"valid\.jsonl:10: "):
        train_qat(recipe, tmp_path / "qat")

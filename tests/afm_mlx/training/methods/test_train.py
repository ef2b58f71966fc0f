"""What all methods of training share: runs that are resumed, and what is refused before a model is loaded."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, ConfigError, DataError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.loop.trainer import Stepped
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import DraftTraining, FullTraining, QATTraining
from afm_mlx.training.methods.model_source import FreshSource, ModelSource
from afm_mlx.training.methods.train import (
    load_teacher,
    measure_adapter,
    open_teacher,
    train_by,
    train_qat,
)
from tests.tools.cases import each
from tests.tools.cli import write_folder
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import OPTIONS, random_adapter


def lora_case(recipe, model, packed, tmp_path, rng):
    rates = {"name": "cosine_decay", "arguments": [1e-2, 4], "warmup": 2, "warmup_init": 1e-4}
    options = {"betas": (0.8, 0.95), "weight_decay": 0.1, "clear_cache_threshold": 0}
    teachers, first = (random_adapter(folder, tmp_path / name, rng, rank=3)
                       for folder, name in ((model, "teachers"), (packed, "first")))  # fmt: skip
    changes = {
        "model": packed,
        "options": dataclasses.replace(recipe.options, lr_schedule=rates, **options),
        "packing": False,
        "teacher": model,
        "teacher_adapter": teachers,
        "divergence": "reverse",
        "distillation_weight": 0.5,
    }
    method = LoRATraining(dropout=0.2, initial_adapter=first, save_dtype="float32")
    return method, changes, {"divergence": "forward"}


def qat_case(recipe, *others):
    changed = {"grad_accumulation_steps": 2, "grad_checkpoint": True, "ema_decay": 0.8}
    options = dataclasses.replace(recipe.options, **changed, optimizer="muon")
    adamw = dataclasses.replace(options, optimizer="adamw")
    return QATTraining(), {"options": options}, {"batch_size": 3, "options": adamw}


def draft_case(recipe, model, packed, tmp_path, rng):
    fresh, other = (FreshSource.for_target(model, "tiny-draft", seed) for seed in (1, 2))
    first, second = (random_adapter(model, tmp_path / name, rng) for name in ("one", "two"))
    changes = {"model": fresh, "teacher": model, "teacher_adapter": first}
    return DraftTraining(), changes, {"teacher_adapter": second, "model": other}


@pytest.mark.usefixtures("draft_preset")
@pytest.mark.parametrize("case", [lora_case, qat_case, draft_case], ids=lambda case: case.__name__)
def test_a_resumed_run_saves_what_an_unbroken_one_does(recipe, model, packed, tmp_path, rng, case):
    options = dataclasses.replace(OPTIONS, iters=4, steps_per_eval=2)
    recipe = dataclasses.replace(recipe, options=options, test=True)
    method, changes, others = case(recipe, model, packed, tmp_path, rng)
    recipe = dataclasses.replace(recipe, **changes)
    unbroken = train_by(method, recipe, tmp_path / "unbroken")
    assert unbroken.test.trained != unbroken.test.untrained

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        train_by(method, recipe, broken, on_event=interrupt)
    assert not list(broken.glob("*.safetensors"))
    with pytest.raises(TrainingError, match="--resume"):
        train_by(method, recipe, broken)
    names = {"options": "optimizer"}  # what differs in them
    for name, value in others.items():
        other = dataclasses.replace(recipe, **{name: value})
        with pytest.raises(
            TrainingError, match=f"{names.get(name, name)}(_weights)? was .* and is now"
        ):
            train_by(method, other, broken, resume=True)
    resumed = train_by(method, recipe, broken, resume=True)
    assert resumed.test == unbroken.test
    (file,) = unbroken.path.glob("*.safetensors")
    assert file.read_bytes() == (broken / file.name).read_bytes()


@each("method", [FullTraining(), DraftTraining(), QATTraining()])
def test_a_quantized_model_has_no_float_weights_to_train(recipe, model, packed, method):
    recipe = dataclasses.replace(recipe, teacher=model)
    with pytest.raises(ConfigError, match=r"is quantized, and .* afm-mlx convert --model .* -d"):
        method.check(recipe, ModelSource.open(packed))


def test_bad_data_is_named_before_a_model_is_loaded(recipe, model, tmp_path):
    (model / "model.safetensors").unlink()
    with (tmp_path / "data" / "valid.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "king", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"valid\.jsonl:10: "):
        train_qat(recipe, tmp_path / "qat")


# -- Teachers that a model can learn from, and those that it can't


def test_a_model_learns_from_itself_on_a_grid_or_with_an_adapter_only(recipe, model):
    student = ModelSource.open(model)
    for teacher in ("self", model):
        alone = dataclasses.replace(recipe, teacher=teacher)
        with pytest.raises(ConfigError, match="nothing to learn"):
            open_teacher(alone, student, may_imitate_itself=False)
        assert open_teacher(alone, student, may_imitate_itself=True).is_same(student)
        adapted = dataclasses.replace(alone, teacher_adapter=model)
        assert open_teacher(adapted, student, may_imitate_itself=False).is_same(student)
    with pytest.raises(ConfigError, match="without a teacher to put it on"):
        dataclasses.replace(recipe, teacher_adapter=model)


def test_a_teacher_has_the_students_vocabulary(recipe, model, tmp_path, spm_bpe, spm_unigram, rng):
    wide = dataclasses.replace(TRAINABLE, vocab_size=TRAINABLE.vocab_size + 8)
    for name, files, message in (
        ("other", (spm_unigram, rng, TRAINABLE), r"different vocabularies \(.* pieces"),
        ("padded", (spm_bpe, rng, wide), r"\(1008 and 1000 rows of the embedding\)"),
    ):
        teacher = ModelSource.open(write_folder(tmp_path / name, *files))
        with pytest.raises(ConfigError, match=message):
            load_teacher(recipe, teacher, ModelSource.open(model))


def test_a_teachers_adapter_is_one_of_its_own(recipe, model, draft, tmp_path, rng):
    stranger = random_adapter(draft, tmp_path / "stranger", rng)
    recipe = dataclasses.replace(recipe, teacher=model, teacher_adapter=stranger)
    with pytest.raises(CheckpointError, match="was made for the model"):
        load_teacher(recipe, ModelSource.open(model), ModelSource.open(draft))


# -- The test split, measured with what was trained and without, against counting token by token


@pytest.fixture
def adapter(model, tmp_path, rng):
    return random_adapter(model, tmp_path / "adapter", rng, size=0.3)


def naive(recipe, adapter):
    model, tokenizer = load(recipe.model, adapter_path=adapter and str(adapter))
    total = weight = tokens = 0.0
    for sample in load_split(recipe.data, "test", tokenizer, max_seq_length=96):
        ids = np.asarray(sample.tokens)
        logits = np.array(model(mx.array(ids[None, :-1])).astype(mx.float32), np.float64)[0]
        normal = np.log(np.exp(logits).sum(-1, keepdims=True))
        losses = -(logits - normal)[np.arange(len(ids) - 1), ids[1:]]
        total += (losses * sample.weights[1:]).sum()
        weight += sample.weights[1:].sum()
        tokens += np.count_nonzero(sample.weights[1:])
    return total / weight, tokens


def test_an_adapter_is_measured_with_and_without(recipe, adapter):
    seen, bars = [], []
    scores = measure_adapter(
        recipe, adapter, on_data=seen.append, progress=lambda *done: bars.append(done)
    )
    for score, path in ((scores.untrained, None), (scores.trained, adapter)):
        loss, tokens = naive(recipe, path)
        assert score.loss == pytest.approx(loss, rel=1e-2)  # int8 keys depend on who shares a row
        assert score.count == tokens == seen[0].n_targets
        assert score.perplexity == pytest.approx(np.exp(loss), rel=0.1)
        assert score.to_dict() == {
            "loss": score.loss, "perplexity": score.perplexity, "tokens": tokens
        }  # fmt: skip
    assert abs(scores.trained.loss - scores.untrained.loss) > 1e-3
    assert bars[-1] == (seen[0].per_epoch,) * 2
    assert len(bars) == 2 * seen[0].per_epoch


def test_some_batches_of_the_base_alone(recipe):
    recipe = dataclasses.replace(recipe, max_seq_length=64, packing=False)
    some, whole, more = (
        measure_adapter(dataclasses.replace(recipe, test_batches=n), None) for n in (2, -1, 10**6)
    )
    assert some.trained is None
    assert 0 < some.untrained.count < whole.untrained.count
    assert more.untrained == whole.untrained


def test_what_can_not_be_measured(recipe, adapter, tmp_path):
    with pytest.raises(TrainingError, match=r"no adapter .*nowhere to test.*--train"):
        measure_adapter(recipe, tmp_path / "nowhere")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_fingerprint"] = "0" * 64
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was made for"):
        measure_adapter(recipe, adapter)
    (recipe.data / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"no test\.jsonl"):
        measure_adapter(recipe, None)

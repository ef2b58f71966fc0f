"""What all methods of training share: runs that are resumed, and what is refused before a model is loaded."""

import dataclasses

import pytest

from afm_mlx.errors import ConfigError, DataError, TrainingError
from afm_mlx.training.loop.trainer import Stepped
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import DraftTraining, FullTraining, QATTraining
from afm_mlx.training.methods.model_source import FreshSource, ModelSource
from afm_mlx.training.methods.train import train_by, train_qat
from tests.tools.cases import each
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
    options = dataclasses.replace(recipe.options, **changed)
    return QATTraining(), {"options": options}, {"batch_size": 3}


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
    for name, value in others.items():
        other = dataclasses.replace(recipe, **{name: value})
        with pytest.raises(TrainingError, match=f"{name}(_weights)? was .* and is now"):
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

"""Training methods on chats with images."""

import base64
import dataclasses
import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.errors import AFMError, ConfigError, DataError
from afm_mlx.loading.load import load
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.loop.losses import Distillation
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.trainer import Preparing, ignore_event
from afm_mlx.training.methods.image_inputs import with_image_inputs
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import FullTraining, QATTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import DataSplits, Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import (
    measure_adapter,
    train_by,
    train_full,
    train_lora,
    train_preferences,
    train_qat,
)
from tests.tools.cases import each
from tests.tools.cli import lines, write_folder
from tests.tools.training_runs import OPTIONS, Watcher
from tests.tools.vision_data import ANSWERS, SEEING, question, write_image_data, write_pictures


@pytest.fixture
def seeing(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "seeing", spm_bpe, rng, SEEING)


@pytest.fixture
def looking(seeing, tmp_path, rng):
    return Recipe(
        write_image_data(tmp_path / "images", rng), OPTIONS, seeing, batch_size=2, test=True
    )


def vision_of(folder):
    return {n: a for n, a in tree_flatten(load(folder)[0].parameters()) if n.startswith("vision.")}


@pytest.mark.parametrize("parts", [("text",), ("adaptor", "encoder"), ("text", "adaptor")])
def test_an_adapter_learns_from_images(looking, seeing, tmp_path, parts):
    method, watcher = LoRATraining(train_parts=parts), Watcher()
    result = train_lora(looking, tmp_path / "adapter", method, **watcher.hooks())
    assert result.test.trained.loss < result.test.untrained.loss
    tensors, _ = load_adapter(result.path)
    found = {".".join(name.split(".")[:2]) for name in tensors}
    names = {"text": "model.", "adaptor": "vision.adaptor", "encoder": "vision.encoder"}
    for part, name in names.items():
        assert any(each.startswith(name) for each in found) == (part in parts)
    # Measured again by the kernels that generation runs, with images' features of the adapter.
    again = measure_adapter(looking, result.path)
    assert result.test.untrained.loss == pytest.approx(again.untrained.loss, rel=1e-3)
    assert result.test.trained.loss == pytest.approx(again.trained.loss, rel=1e-2)
    is_prepared = any(isinstance(event, Preparing) for event in watcher.events)
    assert is_prepared == ("encoder" not in parts)
    # Training goes on from it, in the same parts.
    more = LoRATraining(train_parts=parts, initial_adapter=result.path)
    second = train_lora(looking, tmp_path / "second", more)
    assert load_adapter(second.path)[0].keys() == tensors.keys()


@pytest.mark.parametrize("parts", [("text",), ("text", "adaptor")])
def test_quantized_text_leaves_the_vision_part_float(looking, seeing, tmp_path, parts):
    result = train_qat(looking, tmp_path / "packed", QATTraining(train_parts=parts))
    before, after = vision_of(seeing), vision_of(result.path)
    assert before.keys() == after.keys()
    for name, array in before.items():
        is_trained = name.split(".")[1] in parts
        assert bool(mx.array_equal(array, after[name]).item()) != is_trained, name
    model, _ = load(result.path)
    assert "scales" in model.model.layers[0].mlp.up_proj
    assert model.vision is not None


def test_full_training_of_the_adaptor_alone(looking, seeing, tmp_path):
    result = train_full(looking, tmp_path / "full", FullTraining(train_parts=("adaptor",)))
    assert result.test.trained.loss < result.test.untrained.loss
    before, after = (
        dict(tree_flatten(load(folder)[0].parameters())) for folder in (seeing, result.path)
    )
    changed = {name for name, array in before.items() if not mx.array_equal(array, after[name])}
    assert changed == {name for name in before if name.startswith("vision.adaptor.")}


def test_an_adapter_that_stays_on_the_vision_part_is_left_out_of_the_first_score(
    looking, seeing, tmp_path
):
    whole = dataclasses.replace(OPTIONS, learning_rate=3e-2)
    first = train_lora(
        dataclasses.replace(looking, options=whole),
        tmp_path / "first",
        LoRATraining(train_parts=("text", "adaptor", "encoder")),
    )
    more = LoRATraining(initial_adapter=first.path)  # trains the text part alone
    second = train_lora(looking, tmp_path / "second", more)
    base = measure_adapter(looking, None).untrained.loss
    assert second.test.untrained.loss == pytest.approx(base, rel=1e-4)
    with_first = measure_adapter(looking, first.path).trained.loss
    assert with_first != pytest.approx(base, rel=1e-2)


@pytest.mark.parametrize(
    ("part", "kind"), [("encoder", "tiles"), ("adaptor", "states"), ("", "features")]
)
def test_a_teacher_sees_images_with_its_own_vision_part(looking, seeing, tmp_path, rng, part, kind):
    (model, tokenizer), (teacher, _) = load(seeing), load(seeing)
    model.freeze()
    if part:
        for name, array in tree_flatten(getattr(teacher.vision, part).parameters()):
            noise = 0.3 * mx.array(rng.standard_normal(array.shape), array.dtype)
            getattr(teacher.vision, part).update(tree_unflatten([(name, array + noise)]))
    samples = load_split(looking.data, "train", tokenizer, max_seq_length=256)
    batches = Batches(samples, batch_size=8, length=256, seed=0)
    loss = Distillation(teacher)
    expected = loss(model, batches(0)).item()  # each from pixels
    found = with_image_inputs(model, DataSplits(batches, None, None), ignore_event, teacher).train
    assert {name.removeprefix("rapid_") for name in found(0).images} == {kind}
    assert loss(model, found(0)).item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert (expected > 1e-3) == bool(part)


def test_teachers_that_can_not_take_the_images_are_refused(looking, seeing, tmp_path):
    blind = dataclasses.replace(looking, teacher=write_text_model(seeing, tmp_path))
    with pytest.raises(ConfigError, match="the teacher reads text only"):
        train_lora(blind, tmp_path / "out")
    folder = shutil.copytree(seeing, tmp_path / "other")
    values = json.loads((folder / "config.json").read_text())
    values["vision_config"]["adaptor"] |= {"pool_grid": 3}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="Choose a teacher that takes images alike"):
        train_lora(dataclasses.replace(looking, teacher=folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def preferences(folder, rng, objective):
    folder.mkdir()
    names = write_pictures(folder, rng)
    data = base64.b64encode((folder / names[0]).read_bytes()).decode()
    inline = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    records = []
    for index, answer in enumerate(ANSWERS):
        asked = question(names[index])
        if index == 3:
            asked["content"][0] = inline
        if objective == "kto":
            records.append({"prompt": [asked], "completion": answer, "label": bool(index % 2)})
        else:
            other = ANSWERS[index - 1]
            records.append({"prompt": [asked], "chosen": answer, "rejected": other})
    for split in ("train", "test"):
        lines(folder / f"{split}.jsonl", *records)
    return folder


@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize("parts", [("text",), ("adaptor",)])
def test_preferences_about_images(looking, tmp_path, rng, objective, parts):
    data = preferences(tmp_path / "preferences", rng, objective)
    recipe = dataclasses.replace(looking, data=data)
    method = PreferenceTraining(loss=PreferenceLoss(objective), train_parts=parts)
    watcher = Watcher()
    result = train_preferences(recipe, tmp_path / "adapter", method, **watcher.hooks())
    # Before training, the model is its own reference: no margin.
    assert result.test.untrained.metrics["margin"] == pytest.approx(0, abs=1e-4)
    assert result.test.trained.metrics["margin"] > 0


@pytest.mark.parametrize("is_initial", [True, False])
def test_a_reference_adapter_sees_images_in_its_own_way(looking, tmp_path, rng, is_initial):
    parts = LoRATraining(train_parts=("text", "adaptor"))
    adapter = train_lora(looking, tmp_path / "adapter", parts).path
    data = preferences(tmp_path / "preferences", rng, "dpo")
    recipe = dataclasses.replace(looking, data=data)
    method = PreferenceTraining(
        loss=PreferenceLoss("dpo"),
        initial_adapter=adapter if is_initial else None,
        reference_adapter=adapter,
    )
    result = train_preferences(recipe, tmp_path / "out", method)
    # The model without an adapter, against the reference; from pixels in the second case.
    margin = result.test.untrained.metrics["margin"]
    expected = measure_adapter(recipe, None, method).untrained.metrics["margin"]
    assert margin == pytest.approx(expected, abs=1e-4)
    assert abs(margin) > 1e-3


def test_prompts_with_images_are_not_cut(looking, tmp_path, rng):
    data = preferences(tmp_path / "preferences", rng, "dpo")
    recipe = dataclasses.replace(looking, data=data, max_seq_length=20)
    with pytest.raises(DataError, match="Prompts with images are not cut"):
        train_preferences(recipe, tmp_path / "adapter")


def test_a_reward_model_reads_text_only(looking, tmp_path, rng):
    data = preferences(tmp_path / "preferences", rng, "dpo")
    recipe = dataclasses.replace(looking, data=data, test=False)
    with pytest.raises(DataError, match="reward model reads text only"):
        train_by(RewardTraining(), recipe, tmp_path / "adapter")


def test_a_text_model_refuses_images(recipe, looking, tmp_path):
    with pytest.raises(DataError, match="reads text only"):
        train_lora(dataclasses.replace(recipe, data=looking.data), tmp_path / "adapter")


@each("parts, words", [((), "empty"), (("eyes",), "eyes"), (("text", "text"), "text, text")])
def test_unknown_parts_are_refused(parts, words, looking, tmp_path):
    for method in (LoRATraining, QATTraining, FullTraining):
        with pytest.raises(ConfigError, match=f"train_parts is {words}"):
            train_by(method(train_parts=parts), looking, tmp_path / "out")


def test_scales_of_a_text_model_that_is_not_trained_are_refused(looking, seeing):
    source = ModelSource.open(seeing)
    QATTraining(learn_kv_scales=True, train_parts=("text", "adaptor")).check(looking, source)
    with pytest.raises(ConfigError, match="train_parts is adaptor"):
        QATTraining(learn_kv_scales=True, train_parts=("adaptor",)).check(looking, source)


def test_parts_that_a_text_model_lacks_are_refused(recipe, tmp_path):
    with pytest.raises(ConfigError, match="reads text only"):
        train_lora(recipe, tmp_path / "out", LoRATraining(train_parts=("text", "adaptor")))


def test_an_adapter_on_the_encoder_changes_features(looking, seeing, tmp_path, rng):
    result = train_lora(looking, tmp_path / "adapter", LoRATraining(train_parts=("encoder",)))
    model, _ = load(seeing)
    pixels = mx.array(rng.standard_normal((1, 84, 84, 3)), mx.float32)
    before = model.vision(pixels)
    attach_adapter(model, result.path)
    assert mx.abs(model.vision(pixels) - before).max() > 1e-4
    with pytest.raises(AFMError, match=r"this model has no layer for vision\.encoder"):
        attach_adapter(load(write_text_model(seeing, tmp_path))[0], result.path, force=True)


def write_text_model(seeing, tmp_path):
    """The same model without eyes."""
    folder = shutil.copytree(seeing, tmp_path / "blind")
    values = json.loads((folder / "config.json").read_text())
    del values["vision_config"]
    (folder / "config.json").write_text(json.dumps(values))
    weights = mx.load(str(folder / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if not name.startswith("vision.")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {n: f for n, f in content["weight_map"].items() if n in kept}
        index.write_text(json.dumps(content))
    return folder

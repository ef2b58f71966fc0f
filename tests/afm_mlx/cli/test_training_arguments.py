"""Arguments of `lora` and `qat`, and the fields that they fill."""

import dataclasses

from afm_mlx.cli import main
from afm_mlx.cli.parser import Unavailable
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.full_training import DraftTraining, FullTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.qat_training import QATTraining
from afm_mlx.training.methods.recipe import Recipe
from tests.tools.arguments import actions_of, commands
from tests.tools.cli import lines

KINDS = (Recipe, TrainingOptions, LoRATraining, FullTraining, DraftTraining, QATTraining)
# Code of the commands asks for these by name.
NO_FIELDS = {
    "lora": "train fine_tune_type preset adapter_path save_path draft_preset alpha lora_parameters "
    "resume_adapter_file",
    "qat": "save_path run_path bits q_mode q_granularity q_group_size embedding_bits "
    "q_embedding_granularity quant_predicate",
}
SHARED = """mask_prompt prompt_feature completion_feature chat_feature text_feature optimizer optimizer_config
    distillation_divergence resume plot json"""


def test_each_fills_the_field_of_its_name_or_is_known_to_fill_none():
    """A field that is renamed takes its argument's effect away, and nothing else would say so."""
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    for command, names in NO_FIELDS.items():
        actions = actions_of(commands()[command])
        found = {action.dest for action in actions if not isinstance(action, Unavailable)}
        assert found - fields == {*names.split(), *SHARED.split()}


def test_a_run_lies_beside_its_model_with_and_without_a_slash_behind(monkeypatch, tmp_path):
    data = lines(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"})
    folders = []
    for name, more in {"lora": ["--train", "--fine-tune-type", "full"], "qat": []}.items():
        monkeypatch.setattr(
            f"afm_mlx.cli.{name}.run_training", lambda args, start, path: folders.append(path)
        )
        for slash in ("", "/"):
            argv = [name, *more, "--data", str(data), "--save-path", f"{tmp_path}/out{slash}"]
            assert main(argv) == 0
    assert set(folders) == {tmp_path / "out-run"}

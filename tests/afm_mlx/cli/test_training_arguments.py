"""The recipe that arguments, a file and a preset of `lora` and `qat` make, and what is refused."""

import dataclasses
import json

import pytest

from afm_mlx.cli import main
from afm_mlx.cli.arguments import Unavailable
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.contrastive_training import ContrastiveTraining
from afm_mlx.training.methods.ifp_training import IFPTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import DraftTraining, FullTraining, QATTraining
from afm_mlx.training.methods.policy_training import PolicyTraining
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from tests.tools.arguments import actions_of, commands
from tests.tools.cli import lines

KINDS = (
    Recipe,
    TrainingOptions,
    LoRATraining,
    ContrastiveTraining,
    PreferenceTraining,
    PreferenceLoss,
    PolicyTraining,
    RewardTraining,
    FullTraining,
    DraftTraining,
    IFPTraining,
    QATTraining,
)
# Code of the commands asks for these by name.
NO_FIELDS = {
    "lora": "train fine_tune_type preset adapter_path save_path draft_preset alpha lora_parameters "
    "resume_adapter_file pool json_schema regex choices grammar ifp_stage predictor_rank mask_temperature "
    "binary_masks",
    "qat": "save_path run_path bits q_mode q_granularity q_group_size embedding_bits "
    "q_embedding_granularity quant_predicate",
}
SHARED = """mask_prompt prompt_feature completion_feature chat_feature text_feature optimizer_config
    distillation_divergence resume plot json"""


def test_each_fills_the_field_of_its_name_or_is_known_to_fill_none():
    """A field that is renamed takes its argument's effect away, and nothing else would say so."""
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    for command, names in NO_FIELDS.items():
        actions = actions_of(commands()[command])
        found = {action.dest for action in actions if not isinstance(action, Unavailable)}
        assert found - fields == {*names.split(), *SHARED.split()}


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """What a command line would train: the fields of recipe, options and method, and the run's path."""
    data = lines(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"})
    found = {}

    def plan(args, method, recipe, path):
        kinds = (recipe.options, method, recipe)
        found.update({name: value for kind in kinds for name, value in vars(kind).items()})
        found["path"] = method.default_run_path(path)

    for name in NO_FIELDS:
        monkeypatch.setattr(f"afm_mlx.cli.{name}.run_training", plan)

    def planned(*argv):
        assert main([*map(str, argv), "--data", str(data)]) == 0
        return found.copy()

    return planned


def test_a_preset_is_less_than_a_file_and_more_than_the_defaults(planned, write_config):
    toolkit = {
        "rank": 32,
        "scale": 0.5,
        "learning_rate": 1e-3,
        "epochs": 2,
        "warmup_epochs": 1,
        "warmup_share": None,
        "steps_between": None,
        "schedule": "cosine",
        "final_learning_rate": 0,
        "batch_size": 4,
        "packing": False,
        "grad_accumulation_steps": 1,
        "clip_grad_norm": 1,
        "weight_decay": 0.01,
        "num_layers": -1,
    }
    assert planned("lora", "--preset", "toolkit").items() >= toolkit.items()
    file = write_config(
        "preset: toolkit\nlora_parameters: {rank: 8, scale: 3.0, dropout: 0.1, keys: [mlp.up_proj]}\n"
        "batch_size: 2\nweight_decay: 0\niters: 20\nwarmup_iters: 1\n"
    )
    own = {"rank": 4, "iters": 4, "batch_size": 3}
    flags = [part for name, value in own.items() for part in (f"--{name.replace('_', '-')}", value)]
    of_file = {"scale": 3, "dropout": 0.1, "keys": ("mlp.up_proj",), "warmup_iters": 1}
    of_file |= {"weight_decay": 0, "epochs": None, "warmup_epochs": None}
    found = planned("lora", "-c", file, *flags)
    assert found.items() >= (toolkit | of_file | own).items()


def test_defaults(planned):
    found = planned("lora")
    assert found["path"].parts == ("adapters", "run")
    shared = {"epochs": 3, "steps_between": (100, 1000), "warmup_share": 0.05, "prompt_weight": 0}
    shared |= {"weight_decay": 0, "clip_grad_norm": 1, "ema_decay": None, "divergence": "forward"}
    assert found.items() >= (shared | {"learning_rate": 1e-3, "rank": None}).items()
    found = planned("qat")
    assert found.items() >= (shared | {"learning_rate": 2e-5, "average": True}).items()
    assert (found["rule"].bits, found["rule"].granularity) == (2, "tensor")
    assert (found["embedding_rule"].bits, found["embedding_rule"].granularity) == (4, "row")


def test_arguments_of_qat(planned):
    found = planned(*"qat --bits 4 --q-group-size 32 --ema-decay 0 --no-mask-prompt".split())
    assert (found["rule"].bits, found["rule"].group_size, found["rule"].mode) == (4, 32, "balanced")
    assert (found["rule"].granularity, found["embedding_rule"].group_size) == ("group", 32)
    assert (found["ema_decay"], found["average"], found["prompt_weight"]) == (None, False, 1)
    argv = "qat --q-embedding-granularity group --embedding-bits 8 --calibrate-kv 3 --q-mode affine"
    found = planned(*argv.split())
    assert (found["rule"].mode, found["rule"].granularity) == ("affine", "group")
    assert (found["embedding_rule"].bits, found["embedding_rule"].mode) == (8, "affine")
    assert found["calibrate_kv"] == 3


def test_the_command_line_comes_before_a_file_in_other_words_too(planned, write_config):
    file = write_config("iters: 50\nwarmup_iters: 9\nscale: 3.0\nschedule: constant\n")
    own = "--epochs 1 --warmup-epochs 0.5 --alpha 8 --rank 4".split()
    found = planned("lora", "-c", file, *own)
    assert (found["epochs"], found["warmup_epochs"], found["warmup_share"]) == (1, 0.5, None)
    assert (found["scale"], found["schedule"]) == (2, "constant")
    rate = {"name": "cosine_decay", "arguments": [0.01, 2]}
    own = ("--iters", 1, "--lr-schedule", json.dumps(rate), "--preset", "toolkit")
    found = planned("lora", "-c", file, *own)
    assert (found["lr_schedule"], found["rank"], found["scale"]) == (rate, 32, 3)
    assert (found["iters"], found["epochs"], found["warmup_iters"]) == (1, None, 0)
    assert found["learning_rate"] == 0.01  # for messages


def test_a_yaml_file_of_mlx_lm(planned, write_config):
    """Every key that its example has, and those that its defaults have."""
    file = write_config(
        "model: afm-nano\ntrain: true\nfine_tune_type: lora\noptimizer: adam\n"
        "optimizer_config:\n  adam:\n    betas: [0.8, 0.95]\n    eps: 1e-6\n  adamw: {}\n"
        "seed: 3\nnum_layers: -1\nbatch_size: 2\niters: 3\nval_batches: 25\nlearning_rate: 1e-5\n"
        "steps_per_report: 1\nsteps_per_eval: 1\nresume_adapter_file: first/adapters.safetensors\n"
        "adapter_path: out\nsave_every: 2\ntest: true\ntest_batches: 1\n"
        "grad_checkpoint: false\ngrad_accumulation_steps: 1\nclear_cache_threshold: 0\n"
        "mask_prompt: true\ntrust_remote_code: false\nreport_to: null\nproject_name: null\n"
        "lr_schedule:\n  name: cosine_decay\n  warmup: 2\n  warmup_init: 1e-7\n"
        "  arguments: [1e-2, 10, 1e-7]\n"
    )
    found = planned("lora", "-c", file)
    assert str(found["path"]) == "out/run"
    rate = {"name": "cosine_decay", "warmup": 2, "warmup_init": 1e-7}
    wanted = {"betas": (0.8, 0.95), "eps": 1e-6, "seed": 3, "batch_size": 2, "iters": 3}
    wanted |= {"lr_schedule": rate | {"arguments": [1e-2, 10, 1e-7]}, "val_batches": 25}
    wanted |= {"steps_per_report": 1, "steps_per_eval": 1, "save_every": 2, "test_batches": 1}
    wanted |= {"initial_adapter": "first/adapters.safetensors", "test": True, "warmup_iters": 0}
    wanted |= {"clear_cache_threshold": 0, "num_layers": -1, "prompt_weight": 0, "scale": None}
    assert found.items() >= wanted.items()


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.8, "weight_decay": 0.1, "betas": [0.8, 0.9]}]
)
def test_the_optimizer_and_its_settings(planned, settings):
    config = json.dumps({"muon": settings, "adamw": {"eps": 1}})
    found = planned("qat", "--optimizer", "muon", "--optimizer-config", config)
    wanted = {"momentum": 0.95, "weight_decay": 0, "betas": (0.9, 0.999)} | settings
    wanted |= {"optimizer": "muon", "betas": tuple(wanted["betas"]), "eps": 1e-8}
    assert found.items() >= wanted.items()
    assert planned("lora", "--optimizer", "adam")["optimizer"] == "adamw"


def test_data_under_other_names(planned):
    names = "--prompt-feature question --completion-feature answer --text-feature text --chat-feature turns"
    found = planned("lora", *names.split())["features"]
    assert found == {"prompt": "question", "completion": "answer", "messages": "turns"}


def test_contrastive_training(planned):
    found = planned("lora", "--objective", "contrastive")
    wanted = {"batch_size": 32, "pooling": None, "instruction": None, "temperature": 0.05}
    wanted |= {"dimensions": None, "both_directions": False, "chunk_rows": None, "rank": None}
    assert found.items() >= wanted.items()
    own = "--pool mean --temperature 0.02 --dimensions 64 128 --both-directions --chunk-rows 16"
    more = "--instruction Find --batch-size 256 --rank 4"
    found = planned("lora", "--objective", "contrastive", *own.split(), *more.split())
    wanted = {"pooling": "mean", "temperature": 0.02, "dimensions": (64, 128), "chunk_rows": 16}
    wanted |= {"both_directions": True, "instruction": "Find", "batch_size": 256, "rank": 4}
    assert found.items() >= wanted.items()


def test_preference_training(planned):
    found = planned("lora", "--objective", "dpo")
    assert found["loss"] == PreferenceLoss("dpo")
    wanted = {"batch_size": 4, "reference_adapter": None, "rank": None, "learning_rate": 1e-4}
    assert found.items() >= wanted.items()
    own = "--beta 0.2 --label-smoothing 0.1 --reference-adapter x --rank 4 --batch-size 8"
    found = planned("lora", "--objective", "dpo", *own.split(), "--best-by", "accuracy")
    assert found["loss"] == PreferenceLoss("dpo", 0.2, label_smoothing=0.1)
    assert found.items() >= {"batch_size": 8, "reference_adapter": "x", "rank": 4}.items()
    assert found["best_by"] == "accuracy"
    for own, loss in (
        ("dpop --delta 5", PreferenceLoss("dpop", delta=5.0)),
        ("simpo --simpo-gamma 2", PreferenceLoss("simpo", simpo_gamma=2.0)),
        ("kto --desirable-weight 2 --undesirable-weight 0.5", PreferenceLoss(
            "kto", desirable_weight=2.0, undesirable_weight=0.5)),
    ):  # fmt: skip
        assert planned("lora", "--objective", *own.split())["loss"] == loss


def test_policies(planned, tmp_path):
    found = planned("lora", "--objective", "grpo", "--rewards", "exact")
    assert (found["batch_size"], found["learning_rate"], found["group_size"]) == (8, 1e-4, 8)
    assert (found["rewards"], found["beta"], found["temperature"]) == (("exact",), 0.04, 1.0)
    assert (found["constraint"], found["objective"]) == (None, "grpo")
    more = "--rewards exact length:9 --reward-weights 1 0.5 --group-size 4 --beta 0 --gamma 0.3"
    more += " --temperature 1.2 --max-completion-tokens 7 --updates-per-rollout 3 --regex a+"
    found = planned("lora", "--objective", "mdloo", *more.split())
    assert found["rewards"] == ("exact", "length:9")
    assert found["reward_weights"] == (1.0, 0.5)
    assert [found[name] for name in ("group_size", "beta", "gamma")] == [4, 0.0, 0.3]
    assert (found["temperature"], found["max_completion_tokens"]) == (1.2, 7)
    assert found["constraint"] == Constraint.regex("a+")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    own = ["--rewards", "schema", "--json-schema", schema, "--mask-truncated-completions"]
    found = planned("lora", "--objective", "grpo", *own, "--epsilon", "0.1", "--loss-type", "bnpo")
    assert found["constraint"] == Constraint.json_schema({"type": "integer"})
    assert (found["epsilon"], found["loss_type"]) == (0.1, "bnpo")
    assert found["mask_truncated_completions"] is True


def test_full_and_draft_training(planned, tmp_path):
    for slash in ("", "/"):
        save = ("--save-path", f"{tmp_path}/out{slash}")
        full = planned("lora", "--fine-tune-type", "full", "--num-layers", 1, *save)
        assert (full["num_layers"], full["learning_rate"]) == (1, 1e-5)
        assert full["path"] == planned("qat", *save)["path"] == tmp_path / "out-run"
    own = "--fine-tune-type draft --draft-preset afm-3b-draft --teacher afm-nano --seed 7".split()
    draft = planned("lora", *own, *save)
    assert (draft["divergence"], draft["schedule"]) == ("reverse", "constant")
    assert (draft["model"].name, draft["model"].seed) == ("afm-3b-draft", 7)
    draft = planned("lora", *own, *save, "--preset", "toolkit")
    assert (draft["schedule"], draft["weight_decay"], draft["warmup_epochs"]) == (
        "constant",
        0.01,
        1,
    )
    rate = '{"name":"exponential_decay","arguments":[0.01,0.9]}'
    assert planned("lora", *own, *save, "--lr-schedule", rate)["schedule"] == "cosine"  # not used


REFUSED = {
    "--data nowhere": "no file or folder nowhere",
    "--model nowhere": "There is no folder nowhere",
    "--iters 3 --epochs 1": "both say how long to train; choose one",
    "--warmup-iters 1 --warmup-epochs 1": "both say how long to warm up; choose one",
    "--lr-schedule {} --warmup-iters 2": "both say what the learning rate does",
    "--lr-schedule x": "can't be used as JSON",
    "--lr-schedule {}": "lr_schedule: name is None",
    '--lr-schedule {"name":"cosine_decay","arguments":[1e-3,0]}': "lr_schedule",
    "--epochs 0": "--epochs",
    "--epochs 1e300": "allowed is 0 to 1000000",
    "--learning-rate 0": "0 is out of range; allowed is more than 0",
    "--val-batches 0": "0 is out of range; allowed are 1 and more, or -1 for all",
    "--test-batches 0": "--test-batches",
    "--warmup-iters 3": "warmup_iters is 3; allowed are 0 and more, less than iters",
    "--epochs 1 --warmup-iters 1000": "allowed are fewer",
    "--batch-size 5000": "allowed is 1 to 4096",
    "--max-seq-length 8": "shorten it",
    "--teacher-adapter x": "--teacher-adapter without --teacher",
    "--distillation-weight 0.5": "--distillation-weight without --teacher would do nothing",
    "--distillation-weight -1": "allowed is 0 to 1",
    "--no-mask-prompt --prompt-weight 0.5": "contradict",
    "--optimizer sgd": "adamw, adam, muon",
    '--optimizer-config {"adamw":{"momentum":0.9}}': "allowed are betas, bias_correction, eps, weight_decay",
    '--optimizer muon --optimizer-config {"muon":{"momentum":1}}': "momentum is 1; allowed are numbers in",
    '--optimizer muon --optimizer-config {"muon":{"momentum":"x"}}': "weight_decay and momentum are one each",
    "--optimizer adam --weight-decay 0.1": "adam has no weight decay",
    '--optimizer-config {"adamw":{"nesterov":true}}': "allowed are betas",
    '--optimizer-config {"adamw":{"bias_correction":false}}': "bias_correction is always on",
    '--optimizer-config {"adamw":{"betas":[0.9]}}': "a list of two numbers",
    '--optimizer-config {"adamw":{"betas":[0.9,1]}}': "betas is (0.9, 1)",
    '--optimizer-config {"adamw":{"weight_decay":"x"}}': "weight_decay are one each",
    '--optimizer-config {"adamw":{"eps":1e31}}': "up to 1e+30",
    '--optimizer-config {"adamw":5}': "has 5 for adamw",
    "--clear-cache-threshold much": "'much' is not a size",
    "--clear-cache-threshold 1000001GB": "allowed is up to 1000000GB",
    "--plot loss.pdf": "ends in .png",
    "--plot nowhere/loss.png": "there is no folder nowhere",
    "--report-to wandb": "nothing is sent to wandb",
    "--resume": "holds no run",
}
REFUSED_BY = {
    "lora": {
        "--fine-tune-type dora": "choose from lora, full, draft",
        "--fine-tune-type full": "--save-path is missing",
        "--fine-tune-type full --save-path x --rank 4": "--rank would do nothing",
        "--fine-tune-type full --save-path x --adapter-path y": "--adapter-path would do nothing",
        "--fine-tune-type full --save-path x --preset toolkit": "is for lora and draft",
        "--fine-tune-type draft --save-path x": "--teacher is missing",
        "--fine-tune-type draft --teacher x": "--save-path is missing",
        "--fine-tune-type draft --teacher x --save-path x --draft-preset afm-3b-draft": "both are given",
        "--draft-preset afm-3b-draft": "--draft-preset is for --fine-tune-type draft",
        "--save-path x": "is for full, draft and ifp",
        "--adapter-path=": "--adapter-path is empty",
        "--preset apple": "choose from",
        "--preset toolkit --iters 3": "A warm-up of 1 epochs is",
        "--rank 100000": "rank is 100000; allowed are 1 to 65536",
        "--scale 0": "an adapter of scale 0 learns nothing",
        "--alpha 4 --scale 2": "both say how strong the adapter is; choose one",
        "--alpha 4 --initial-adapter x": "--alpha needs --rank, too",
        "--initial-adapter x --resume-adapter-file y": "both say where to start; choose one",
        "--resume-adapter-file nowhere": "nowhere is no folder",
        "--keys mlp.nothing": "No block has a linear layer mlp.nothing",
        "--num-layers 9": "--num-layers of LoRA is 9",
        "--save-dtype bfloat16": "choose from",
        '--lora-parameters {"r":4}': "rank, scale, dropout, keys",
        '--lora-parameters {"rank":0}': "allowed is 1 or more",
        '--lora-parameters {"rank":"x"}': "--lora-parameters: rank",
        '--lora-parameters {"dropout":1}': "to 0.999",
        '--lora-parameters {"keys":[1]}': "--lora-parameters: keys",
        "--objective pairs": "choose from",
        "--pool mean": "--pool would do nothing with --objective next-token; it is for contrastive.",
        "--no-both-directions": "--both-directions would do nothing with --objective next-token",
        "--beta 0.2": "next-token; it is for dpo, ipo, hinge, dpop, orpo, simpo, kto, grpo, rloo, mdloo.",
        "--objective dpo --pool mean": "--pool would do nothing with --objective dpo",
        "--objective dpo --delta 3": "--delta would do nothing with --objective dpo; it is for dpop.",
        "--objective orpo --reference-adapter x": "--reference-adapter would do nothing with --objective orpo",
        "--objective dpo --beta 0": "0 is out of range; allowed is more than 0",
        "--objective dpo --reference-adapter nowhere": "nowhere is no folder",
        "--objective dpo": "the line lacks 'chosen' and 'rejected'",
        "--objective kto": "the line lacks 'completion' and 'label'",
        "--objective kto --preset toolkit": "--preset toolkit is of no use with --objective kto",
        "--objective dpo --teacher x": "teacher would do nothing",
        "--objective grpo": "--rewards is missing",
        "--objective grpo --rewards exakt": "no reward 'exakt'",
        "--objective grpo --rewards exact --reward-weights 1 2": "2 weights for 1 rewards",
        "--objective grpo --rewards exact --regex a --choices b": "--regex",
        "--objective grpo --rewards exact --gamma 1": "it is for mdloo",
        "--objective rloo --rewards exact --epsilon 0.1": "it is for grpo",
        "--objective rloo --rewards exact --updates-per-rollout 2": "it is for grpo, mdloo",
        "--objective dpo --rewards exact": "it is for grpo, rloo, mdloo",
        "--objective grpo --rewards exact --dropout 0.1": "dropout is 0.1",
        "--objective grpo --rewards exact --no-mask-prompt": "--no-mask-prompt is of no use",
        "--objective dpo --fine-tune-type full --save-path x": "full is of no use",
        "--objective dpo --test": "There is no adapter adapters to test",
        "--objective contrastive": "a pair is",
        "--objective contrastive --temperature 0": "0 is out of range; allowed is more than 0",
        "--objective contrastive --dimensions 64 64": "dimensions are [64, 64]",
        "--objective contrastive --preset toolkit": "--preset toolkit is of no use",
        "--objective contrastive --no-mask-prompt": "--no-mask-prompt is of no use",
        "--objective contrastive --teacher x": "teacher would do nothing",
        "--objective contrastive --packing": "packing would do nothing",
        "--objective contrastive --text-feature body": "features would do nothing",
        "--objective contrastive --chunk-rows 4 --dropout 0.1": "computes texts twice",
        "--objective contrastive --fine-tune-type full --save-path x": "full is of no use",
        "--objective contrastive --test": "There is no adapter adapters to test",
        "--test": "There is no adapter adapters to test",
        "--test --fine-tune-type full": "--test alone measures an adapter",
        '--test --lora-parameters {"r":4}': "unknown key r",
        "--test --teacher x": "--teacher would do nothing",
        "--train --test --data {data}/train.jsonl": "there is nothing to test",
    },
    "qat": {
        "--bits 3": "2, 4, 8",
        "--bits 2 --quant-predicate mixed_2_4": "choose one",
        "--quant-predicate mixed_3_6": "takes 2, 4 and 8",
        "--q-group-size 5": "groups of 5 do not divide",
        "--save-path .": "exists already",
    },
}


@pytest.mark.parametrize("command", REFUSED_BY)
def test_what_is_refused_leaves_nothing(
    trainable_folder, data, fails, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    base = (command, "--model", trainable_folder, "--data", data, "--max-seq-length", 96)
    for line, words in (REFUSED | REFUSED_BY[command]).items():
        argv = line.replace("{data}", str(data)).split()
        iters = () if "--epochs" in argv else ("--iters", 3)
        error = fails(*base, *iters, *argv)
        assert words in error, line
        assert len(error) < 1200
        assert set(tmp_path.iterdir()) == before
    assert "--data is missing" in fails(command)


def test_a_plot_that_can_not_be_drawn_is_known_before_training(data, fails, monkeypatch, tmp_path):
    monkeypatch.setattr("afm_mlx.cli.training_runs.find_spec", lambda name: None)
    err = fails("qat", "--data", data, "--plot", tmp_path / "x.png")
    assert "--plot needs matplotlib" in err

"""Training: full weights, LoRA adapters, and quantization-aware training, with one loop."""

from afm_mlx.ranks import Ranks, join_ranks
from afm_mlx.training.data.batches import Batch, Batches
from afm_mlx.training.data.samples import Sample, encode_chat, has_split, load_split
from afm_mlx.training.loop.losses import CrossEntropy, Distillation
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.run_folder import RunFolder, plot_metrics
from afm_mlx.training.loop.trainer import RunOutcome, train
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.contrastive_training import ContrastiveTraining
from afm_mlx.training.methods.ifp_training import IFPTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import DraftTraining, FullTraining, QATTraining
from afm_mlx.training.methods.model_source import FreshSource
from afm_mlx.training.methods.policy_training import PolicyTraining
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import (
    Scores,
    SplitScore,
    measure_adapter,
    train_contrastive,
    train_draft,
    train_full,
    train_ifp,
    train_lora,
    train_preferences,
    train_qat,
)
from afm_mlx.training.pruning.mask_training import RecoveryTraining
from afm_mlx.training.pruning.prune import Pruning, prune
from afm_mlx.training.qat.kv_scales import calibrate_kv_scales
from afm_mlx.training.qat.qat_layers import pack_qat, prepare_qat

__all__ = [
    "Batch",
    "Batches",
    "ContrastiveTraining",
    "CrossEntropy",
    "Distillation",
    "DraftTraining",
    "FreshSource",
    "FullTraining",
    "IFPTraining",
    "LoRATraining",
    "PolicyTraining",
    "PreferenceLoss",
    "PreferenceTraining",
    "Pruning",
    "QATTraining",
    "Ranks",
    "Recipe",
    "RecoveryTraining",
    "RewardTraining",
    "RunFolder",
    "RunOutcome",
    "Sample",
    "Scores",
    "SplitScore",
    "TrainingOptions",
    "calibrate_kv_scales",
    "encode_chat",
    "has_split",
    "join_ranks",
    "load_split",
    "measure_adapter",
    "pack_qat",
    "plot_metrics",
    "prepare_qat",
    "prune",
    "train",
    "train_contrastive",
    "train_draft",
    "train_full",
    "train_ifp",
    "train_lora",
    "train_preferences",
    "train_qat",
]

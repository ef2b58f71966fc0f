"""Training: full weights, LoRA adapters, and weights on a grid (quantization-aware), in one loop."""

from afm_mlx.training.batches import Batch, Batches
from afm_mlx.training.data import Sample, encode_chat, has_split, load_split
from afm_mlx.training.kinds import DraftTraining, FullTraining, LoRATraining, QATTraining
from afm_mlx.training.kv_scales import calibrate_kv_scales
from afm_mlx.training.losses import CrossEntropy, Distillation
from afm_mlx.training.methods import train_draft, train_full, train_lora, train_qat
from afm_mlx.training.options import TrainingOptions
from afm_mlx.training.plot import plot_metrics
from afm_mlx.training.qat import pack_qat, prepare_qat
from afm_mlx.training.recipe import Recipe
from afm_mlx.training.run_folder import RunFolder
from afm_mlx.training.scores import Score, Scores, measure_adapter
from afm_mlx.training.source import FreshSource
from afm_mlx.training.trainer import Outcome, train

__all__ = [
    "Batch",
    "Batches",
    "CrossEntropy",
    "Distillation",
    "DraftTraining",
    "FreshSource",
    "FullTraining",
    "LoRATraining",
    "Outcome",
    "QATTraining",
    "Recipe",
    "RunFolder",
    "Sample",
    "Score",
    "Scores",
    "TrainingOptions",
    "calibrate_kv_scales",
    "encode_chat",
    "has_split",
    "load_split",
    "measure_adapter",
    "pack_qat",
    "plot_metrics",
    "prepare_qat",
    "train",
    "train_draft",
    "train_full",
    "train_lora",
    "train_qat",
]

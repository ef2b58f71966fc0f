"""Mixtures of fewer experts: score experts, remove the worst of each layer, and save the smaller model.

    one-shot    one round
    iterative   several rounds; the experts that are left are scored again before each
    lottery     several rounds, after each of which all weights are trained

Source: arXiv 2504.05586. The result is a folder of the same architecture, which stock mlx-lm runs too. Packed
experts keep their codes and scales.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx import threads
from afm_mlx.checkpoint.folder_texts import write_trained_card
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.files import place_beside, refuse_existing
from afm_mlx.jsonl import data_file
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_model, register_models
from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity
from afm_mlx.progress import Progress
from afm_mlx.ranks import refuse_ranks
from afm_mlx.training.methods.method import FullTraining, save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import RunArguments, train_by
from afm_mlx.training.pruning.expert_layers import (
    EXPERT_KEYS,
    ExpertLayer,
    cut_parameters,
    expert_layers,
    fewer_experts,
    model_shapes,
)
from afm_mlx.training.pruning.expert_observer import observe_experts
from afm_mlx.training.pruning.expert_scores import CRITERIA, DROPS, expert_scores, kept_experts

_MEASURED = 256
"""Pieces of documents on which perplexity is measured, as by `afm-mlx perplexity`."""


@dataclass(frozen=True)
class ExpertPruning:
    """Which experts are removed.

    Args:
        share: kept share of each layer's experts, in (0, 1).
        criterion: how experts are scored, see `expert_scores`.
        drop: whether the experts with the "lowest" or the "highest" scores are removed.
        rounds: number of rounds; each removes about the same number of experts, at least one.
        score_texts: number of texts, up to 512 tokens each, that experts are scored on; -1 for all.
        seed: seed of the choice of texts and of the criterion "random".
        train: train all weights after each round, by the recipe.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    share: float = 0.5
    criterion: str = "reap"
    drop: str = "lowest"
    rounds: int = 1
    score_texts: int = -1
    seed: int = 0
    train: bool = False

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("share", 0 < self.share < 1, "more than 0 and less than 1"),
            ("criterion", self.criterion in CRITERIA, ", ".join(CRITERIA)),
            ("drop", self.drop in DROPS, ", ".join(DROPS)),
            ("rounds", self.rounds >= 1, "1 or more"),
            ("score_texts", self.score_texts == -1 or self.score_texts >= 1, "1 or more, or -1"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; allowed: {allowed}.")


@dataclass(frozen=True)
class ExpertPruneResult:
    """A model with fewer experts.

    Attributes:
        path: its folder.
        experts_before, experts_after: experts of each router.
        kept: (groups, experts_after) indices of the whole model's experts that are left, by layer.
        bytes_before, bytes_after: stored weights.
        perplexity_before, perplexity_after: on the data, see `prune_experts`.
        tokens: number of tokens that perplexity was measured on.
    """

    path: Path
    experts_before: int
    experts_after: int
    kept: Mapping[str, np.ndarray]
    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    tokens: int


@dataclass(frozen=True)
class _Experts:
    """Where a config has its number of experts, and what depends on it."""

    key: tuple[str, ...]
    number: int
    sections: int  # of experts, of which the router chooses some first
    chosen_sections: int
    layers: list[ExpertLayer]

    @classmethod
    def of(cls, source: ModelSource) -> _Experts:
        """Find a model's experts; raise `ConfigError` if there are none."""
        if not source.is_afm:
            whole = _built_shapes(source.values)
            for key, number in _expert_numbers(source.values):
                small = _built_shapes(fewer_experts(source.values, key, number - 1))
                if layers := expert_layers(whole, small, number, number - 1):
                    inner = source.values if len(key) == 1 else source.values[key[0]]
                    sections = inner.get("n_group") or 1
                    chosen = inner.get("topk_group") or sections
                    return cls(key, number, sections, chosen, layers)
        raise ConfigError(
            f"{source.folder} has no layers with several experts, so none can be removed. For a dense AFM "
            "model, afm-mlx prune --ffn makes a task mask."
        )

    def check(self, model: nn.Module, number: int, text: list[int]) -> None:
        """Raise `ConfigError` unless all routers can choose among `number` experts; computes a text."""
        found = observe_experts(model, self.layers, [text])
        for layer, sums in zip(self.layers, found, strict=True):
            if number < sums.k:
                raise ConfigError(
                    f"{number} of {self.number} experts would be kept, and {layer.path} computes {sums.k} for "
                    f"each token. Keep a share of {sums.k / self.number:.3g} or more."
                )
            inside = number // self.sections
            if self.sections > 1 and (inside < 2 or inside * self.chosen_sections < sums.k):
                raise ConfigError(
                    f"{inside} experts would be kept in each of {self.sections} groups, of which the router "
                    f"chooses {self.chosen_sections}, and then {sums.k} experts. Keep more."
                )

    def rounded(self, number: float) -> int:
        """Return a number of experts that is the same in each section."""
        return max(1, round(number / self.sections)) * self.sections


def prune_experts(
    recipe: Recipe,
    path: str | Path,
    pruning: ExpertPruning | None = None,
    *,
    progress: Progress | None = None,
    on_stage: Callable[[str], None] | None = None,
    **training: Unpack[RunArguments],
) -> ExpertPruneResult:
    """Remove experts of a mixture of mlx-lm or of parallel tracks, float or packed, and save the smaller model.

    Perplexity is measured before and after on test.jsonl of the data's folder, else on valid.jsonl, else on
    train.jsonl.

    Args:
        recipe: the model and the data: a folder with train.jsonl, or a file; how to train, if `pruning.train`.
        path: folder to make, whole or not at all.
        pruning: which experts are removed.
        progress: called with the numbers of scored and of all texts of a round.
        on_stage: called with a line of text whenever a round begins.
        training: `on_plan`, `on_event` and `stopping` of `train_by`.

    Raises:
        AFMError: for an argument, data or a model that can't be used.
    """
    threads.check_process()
    refuse_ranks("A model with fewer experts")
    path, pruning = Path(path), pruning or ExpertPruning()
    refuse_existing(path)
    source = current = ModelSource.open(recipe.model)
    whole = _Experts.of(source)
    if pruning.train:
        source.refuse_quantized("training between rounds")
    target = _target(whole, pruning)
    texts = cut(_documents(recipe, source), num_samples=pruning.score_texts, seed=pruning.seed)
    measured = cut(load_documents(recipe.data, source.tokenizer), num_samples=_MEASURED)
    kept: dict[str, np.ndarray] = {}
    with place_beside(path) as place:
        model = source.load()
        warn_if_slow(model)
        whole.check(model, target, texts[0])
        before = measure_perplexity(model, source.tokenizer, measured).perplexity
        for index in range(1, pruning.rounds + 1):
            experts = whole if index == 1 else _Experts.of(current)
            removed = (whole.number - target) * index / pruning.rounds
            number = whole.rounded(whole.number - removed)
            if on_stage is not None:
                on_stage(f"Round {index} of {pruning.rounds}: {experts.number} to {number} experts")
            found = _choose(model, experts, number, texts, pruning, index, progress)
            del model
            files = place / f"round-{index}"
            folder = files / "fewer"
            _write(current, experts, number, found, folder)
            for name, ids in found.items():
                kept[name] = np.take_along_axis(kept[name], ids, axis=1) if name in kept else ids
            if pruning.train:
                # Each round trains on the samples in an order of its own.
                seed = (recipe.options.seed + index - 1) % 2**64
                options = dataclasses.replace(recipe.options, seed=seed)
                step = dataclasses.replace(recipe, model=folder, options=options)
                hooks: RunArguments = {**training, "run_path": files / "run"}
                folder = files / "trained"
                train_by(FullTraining(), step, folder, **hooks)
            if index > 1:
                shutil.rmtree(place / f"round-{index - 1}")
            current = ModelSource.open(folder)
            model = current.load()
        after = measure_perplexity(model, source.tokenizer, measured)
        result = ExpertPruneResult(
            path=path,
            experts_before=whole.number,
            experts_after=target,
            kept=kept,
            bytes_before=_stored_bytes(source),
            bytes_after=_stored_bytes(current),
            perplexity_before=before,
            perplexity_after=after.perplexity,
            tokens=after.tokens,
        )
        _write_card(folder, source, pruning, result, len(texts))
        shutil.move(folder, path)
    return result


def _target(whole: _Experts, pruning: ExpertPruning) -> int:
    """Return the number of experts that stay; raise `ConfigError` if a round would remove none."""
    target = whole.rounded(pruning.share * whole.number)
    if target >= whole.number:
        raise ConfigError(
            f"A share of {pruning.share:g} keeps all {whole.number} experts; choose a smaller one."
        )
    removable = (whole.number - target) // whole.sections
    if pruning.rounds > removable:
        raise ConfigError(
            f"rounds is {pruning.rounds}, and {target} of {whole.number} experts would be kept, so some rounds "
            f"would remove none; allowed are 1 to {removable}."
        )
    return target


def _stored_bytes(source: ModelSource) -> int:
    return sum(tensor.nbytes for tensor in stored_tensors(source.folder).values())


def _documents(recipe: Recipe, source: ModelSource) -> list[list[int]]:
    """Return the token ids of the texts that experts are scored on."""
    data = Path(recipe.data)
    if data.is_dir():
        data = data_file(data, "train") or data
    return load_documents(data, source.tokenizer)


def _choose(
    model: nn.Module,
    experts: _Experts,
    number: int,
    texts: list[list[int]],
    pruning: ExpertPruning,
    index: int,
    progress: Progress | None,
) -> dict[str, np.ndarray]:
    """Return the experts that stay, by layer."""
    scores = expert_scores(
        model,
        experts.layers,
        texts,
        pruning.criterion,
        drop=pruning.drop,
        seed=(pruning.seed, index),
        progress=progress,
    )
    return {
        layer.path: kept_experts(own, layer, number, experts.sections)
        for layer, own in zip(experts.layers, scores, strict=True)
    }


def _write(
    source: ModelSource, experts: _Experts, number: int, kept: Mapping[str, np.ndarray], path: Path
) -> None:
    """Write the folder of a model with the kept experts, which are `number` of each router."""
    model, _ = load_mlx_lm_model(source.folder)  # arrays as stored
    parameters = dict(tree_flatten(model.parameters()))
    changed: dict[str, mx.array] = {}
    for layer in experts.layers:
        changed |= cut_parameters(parameters, layer, kept[layer.path])
    del parameters
    model.load_weights(list(changed.items()), strict=False)
    values = fewer_experts(source.values, experts.key, number)
    save_model_folder(path, model, values, source, what="A model with fewer experts.", facts={})


def _write_card(
    folder: Path, source: ModelSource, pruning: ExpertPruning, result: ExpertPruneResult, texts: int
) -> None:
    rounds = f"{pruning.rounds} rounds" if pruning.rounds > 1 else "one round"
    trained = ", all weights trained after each" if pruning.train else ""
    facts = {
        "experts": f"{result.experts_after} of {result.experts_before} in {len(result.kept)} layers",
        "criterion": f"{pruning.drop} {pruning.criterion}, {rounds}{trained}, seed {pruning.seed}",
        "data": f"{texts:,} texts",
        "weights": f"{result.bytes_after:,} of {result.bytes_before:,} bytes",
        "perplexity on the data": f"{result.perplexity_after:.3f}, {result.perplexity_before:.3f} before",
    }
    write_trained_card(
        folder,
        name=result.path.name,
        source=source.name,
        model_type=str(source.values.get("model_type")),
        what="A mixture of experts, some of which were removed.",
        facts=facts,
    )


def _built_shapes(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an architecture's float parameters; no array is computed."""
    from mlx_lm import utils

    register_models()
    config = {k: v for k, v in values.items() if k not in ("quantization", "quantization_config")}
    try:
        architecture, arguments = utils._get_classes(config)
        return model_shapes(architecture(arguments.from_dict(config)))
    except AFMError:
        raise
    except Exception as error:  # a config may make mlx-lm raise anything
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"mlx-lm can't build a model of type {shown(config.get('model_type'))}: {reason}."
        ) from error


def _expert_numbers(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the paths of keys in config.json that can be numbers of experts, and the numbers."""
    inner = values.get("text_config")
    for prefix, found in (
        ((), values),
        (("text_config",), inner if isinstance(inner, dict) else {}),
    ):
        for name in EXPERT_KEYS:
            if type(number := found.get(name)) is int and number > 1:
                yield (*prefix, name), number

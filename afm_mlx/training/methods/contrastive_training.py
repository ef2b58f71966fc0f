"""Training of a LoRA adapter whose vectors of a query and of the text that answers it are alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import AdapterConfig, EmbeddingUse
from afm_mlx.errors import ConfigError
from afm_mlx.model.pooling import check_states
from afm_mlx.tokenizer.embedding_text import embedding_tokens, query_text
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.data.pairs import PAIR_FORM, PairBatches, load_pairs
from afm_mlx.training.loop.contrastive_loss import ContrastiveLoss
from afm_mlx.training.methods.lora_training import LoRATraining, read_initial
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, max_sample_length


@dataclass(frozen=True)
class ContrastiveTraining(LoRATraining):
    """Train LoRA pairs by a contrastive loss over pairs of a query and a positive, see `ContrastiveLoss`.

    The recipe's `batch_size` is the number of pairs in a batch; its rows are texts. It has no teacher, no
    packing, and none of the arguments about the parts of a chat.

    Args:
        pooling: see `ContrastiveLoss`; pass None for the initial adapter's, or "last".
        instruction: text before each query, which the adapter's folder keeps; pass None for the initial
            adapter's, or none.
        temperature, dimensions, both_directions: see `ContrastiveLoss`.
        chunk_rows: texts whose activations are in memory at a time; pass None for all texts of a batch, which
            takes two thirds of the time or less.
    """

    pooling: str | None = None
    instruction: str | None = None
    temperature: float = 0.05
    dimensions: tuple[int, ...] | None = None
    both_directions: bool = False
    chunk_rows: int | None = None
    kind = "contrastive"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss(self.pooling or "last")  # raises for arguments out of range
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {self.chunk_rows}; allowed are 1 and more, and None.")
        if self.chunk_rows is not None and self.dropout:
            raise ConfigError(
                f"chunk_rows computes texts twice, and dropout ({self.dropout}) would differ. Leave one of "
                "them out."
            )

    def use(self) -> EmbeddingUse:
        """Return how the adapter is used: as the arguments say, else as the initial adapter, else plainly.

        Raises `AFMError` if the initial adapter can't be read.
        """
        found = EmbeddingUse()
        if self.initial_adapter is not None:
            found = read_initial(self.initial_adapter, self.scale)[1].embedding or found
        given = {"pooling": self.pooling, "instruction": self.instruction}
        return dataclasses.replace(found, **{k: v for k, v in given.items() if v is not None})

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        super().check(recipe, source)
        chats = "it is about tokens, and a contrastive loss about whole texts"
        for name, is_given, reason in (
            ("teacher", recipe.teacher is not None, "a contrastive loss has none"),
            ("packing", bool(recipe.packing), "each text has a row"),
            ("prompt_weight", recipe.prompt_weight != 0, chats),
            ("features", bool(recipe.features), f"a pair is {PAIR_FORM}"),
        ):
            if is_given:
                raise ConfigError(f"{name} would do nothing: {reason}. Leave it out.")

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> PairBatches:
        use = self.use()

        def encode(text: str, is_query: bool) -> list[int]:
            whole = query_text(text, use.instruction) if is_query else text
            return embedding_tokens(source.tokenizer, whole, use.pooling)

        return PairBatches(
            load_pairs(recipe.data, split),
            encode,
            batch_size=recipe.batch_size,
            max_seq_length=max_sample_length(recipe, source),
            group_rows=self.chunk_rows,
            seed=recipe.options.seed,
            shuffle=split == "train",
        )

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> ContrastiveLoss:
        return dataclasses.replace(self.test_loss(), cached=self.chunk_rows is not None)

    def test_loss(self) -> ContrastiveLoss:
        return self._loss(self.use().pooling)

    def _loss(self, pooling: str) -> ContrastiveLoss:
        return ContrastiveLoss(pooling, self.temperature, self.dimensions, self.both_directions)

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        check_states(model)
        super().prepare(model, source, batches, seed)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        names = ("temperature", "dimensions", "both_directions", "chunk_rows")
        own = {name: getattr(self, name) for name in names}
        return super().manifest(model) | own | {"embedding": dataclasses.asdict(self.use())}

    def config(self, model: nn.Module, source: ModelSource) -> AdapterConfig:
        return dataclasses.replace(super().config(model, source), embedding=self.use())

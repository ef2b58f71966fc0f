"""Batches with prompts that choose masks: which mask each token runs with, in both stages."""

from __future__ import annotations

import numpy as np
import pytest

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.mask_batches import MaskBatches
from afm_mlx.training.data.samples import Sample, encode_chat


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("afm-nano"))


def text(rng, n, where="a:1"):
    weights = np.ones(n, np.float32)
    weights[0] = 0
    return Sample(rng.integers(8, 99, n), weights, where)


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_choose_the_mask_of_the_next_one(rng, tokenizer, packed):
    sizes = (2, 3, 7, 8, 9, 12, 13, 20)
    samples = [text(rng, n) for n in sizes]
    options = {"batch_size": 2, "length": 24, "packed": packed, "seed": 3}
    batches = MaskBatches(samples, "chunk", tokenizer, 4, **options)
    targets, masks = 0, 0
    for step in range(batches.per_epoch):
        batch = batches(step)
        inputs, mask_of = np.array(batch.inputs), np.array(batch.mask_of)
        lengths, prompts = np.array(batch.lengths), np.array(batch.prompts)
        masks += int(np.array(batch.is_prompt).sum())
        for position, label, weight in zip(
            *map(np.array, (batch.positions, batch.labels, batch.weights)), strict=True
        ):
            if weight == 0:
                continue
            targets += 1
            row, column = divmod(int(position), inputs.shape[1])
            number = mask_of[row, column]
            prompt = prompts[number, : lengths[number]].tolist()
            # The predicted token is in the chunk right behind the prompt's.
            found = [
                (i, j)
                for sample in samples
                for i, j in [_after(sample.tokens.tolist(), prompt)]
                if i is not None and label in sample.tokens[i:j]
            ]
            assert found
    assert masks == sum(-(-n // min(4, (n + 1) // 2)) - 1 for n in sizes)
    assert targets == sum(n - min(4, (n + 1) // 2) for n in sizes)


def _after(tokens, prompt):
    """Return the bounds of the chunk behind a chunk of this text; None if it has no such chunk."""
    size = min(4, (len(tokens) + 1) // 2)
    for start in range(0, len(tokens) - size, size):
        if tokens[start : start + size] == prompt:
            return start + size, start + 2 * size
    return None, None


def test_the_token_before_a_chunk_runs_with_the_chunks_mask(rng, tokenizer):
    sample = text(rng, 10)
    batch = MaskBatches([sample], "chunk", tokenizer, 4, batch_size=1, length=9)(0)
    assert np.array(batch.mask_of)[0].tolist() == [0] * 7 + [1] * 2
    assert np.array(batch.lengths)[:2].tolist() == [4, 4]
    assert np.array(batch.prompts)[1, :4].tolist() == sample.tokens[4:8].tolist()
    assert np.array(batch.positions)[:6].tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.prompts.shape == (16, 64)
    assert np.array(batch.is_prompt).tolist() == [True] * 2 + [False] * 14


def test_prompts_choose_the_mask_of_whole_chats(tokenizer):
    samples, ends = [], []
    for question in ("hi", "how are you"):
        user, answer = {"role": "user", "content": question}, {"role": "assistant", "content": "ok"}
        messages = [user, answer, {"role": "user", "content": "and?"}, answer]
        samples.append(Sample(*encode_chat(messages, None, tokenizer), "a:1"))
        ends.append(len(tokenizer.apply_chat_template([user], add_generation_prompt=True)))
    options = {"batch_size": 1, "length": 128, "shuffle": False}
    batch = MaskBatches(samples, "prompt", tokenizer, **options)(0)
    plain = Batches(samples, **options)(0)
    for name in plain._fields[:5]:  # images are of other batches
        assert (getattr(plain, name) == getattr(batch, name)).all().item(), name
    segments, mask_of = np.array(batch.segments)[0], np.array(batch.mask_of)[0]
    lengths = np.array(batch.lengths)
    assert sorted(lengths[:2].tolist()) == sorted(ends)
    for number in (0, 1):
        row = np.array(batch.inputs)[0][segments == number + 1]
        assert (mask_of[segments == number + 1] == number).all()
        prompt = np.array(batch.prompts)[number, : lengths[number]]
        assert (row[: len(prompt)] == prompt).all()


def test_what_is_refused(rng, tokenizer):
    options = {"batch_size": 1, "length": 64}
    with pytest.raises(ConfigError, match="The stage is 'none'"):
        MaskBatches([text(rng, 9)], "none", tokenizer, **options)
    with pytest.raises(ConfigError, match="A chunk of 0 tokens"):
        MaskBatches([text(rng, 9)], "chunk", tokenizer, 0, **options)
    with pytest.raises(DataError, match="b:7: a text has no prompt"):
        MaskBatches([text(rng, 9, "b:7")], "prompt", tokenizer, **options)
    early = Sample([1, 2, 3, 4], [0, 1, 0, 0], "c:1")
    with pytest.raises(DataError, match="c:1: all targets are among the first 2 tokens"):
        MaskBatches([early], "chunk", tokenizer, **options)


def test_fingerprints_differ_by_stage_and_chunk(rng, tokenizer):
    samples = [text(rng, 30)]
    options = {"batch_size": 1, "length": 64}
    found = {
        MaskBatches(samples, "chunk", tokenizer, chunk, **options).fingerprint for chunk in (4, 5)
    }
    assert len(found | {Batches(samples, **options).fingerprint}) == 3

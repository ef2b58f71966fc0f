"""Masks by prompts in a pool: one for a conversation, and the same answers as with its folder."""

from __future__ import annotations

import mlx.core as mx
import pytest

from afm_mlx import load, stream_generate
from afm_mlx.adapters.mask_predictor import MaskPredictor, PredictorConfig, small_model
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.prompt_masks import PromptMasks
from afm_mlx.adapters.task_mask import write_mask
from afm_mlx.errors import RequestError
from afm_mlx.model.model import Model


def test_a_conversation_keeps_its_mask(tmp_path):
    model, tokenizer = load()
    mx.random.seed(1)
    args = model.args
    config = PredictorConfig(args.num_layers, args.ffn_dim, args.ffn_dim // 2)
    predictor = MaskPredictor(Model(small_model(args)), config, seed=2)
    pool = AdapterPool(model)
    masks = PromptMasks(pool, predictor.eval(), tokenizer)

    def prompt(*texts):
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    before = pool.registered
    first, other = prompt("Tag the topics."), prompt("Make this formal:\nhi Ana")
    name = masks.name_for(first)
    assert masks.name_for(prompt("Tag the topics.", "food", "And of this?")) == name
    assert masks.name_for(other) != name
    assert len(pool.registered) == len(before) + 2
    mask = predictor.task_mask([first])
    write_mask(tmp_path, mask)
    pool.register("folder", tmp_path)

    def answer(adapter):
        options = {"max_tokens": 6, "adapter": adapter, "adapters": pool}
        return [each.token for each in stream_generate(model, tokenizer, first, **options)]

    assert answer(name) == answer("folder")
    assert masks.name_for(tokenizer.encode("A text.")) not in (name, "folder")
    with pytest.raises(RequestError, match="without tokens"):
        masks.name_for([])

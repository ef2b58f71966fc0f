"""Recipes: epochs and shares as steps."""

import dataclasses

import pytest

from afm_mlx.errors import ConfigError
from tests.tools.training_runs import OPTIONS


def test_epochs_and_shares_become_steps(recipe):
    options = dataclasses.replace(OPTIONS, iters=4, grad_accumulation_steps=2)
    recipe = dataclasses.replace(recipe, options=options, epochs=1.5, warmup_share=0.1)
    settled = recipe.loop_options(100)
    assert (settled.iters, settled.warmup_iters) == (75, 7)
    assert recipe.loop_options(10000).warmup_iters == 100
    whole = dataclasses.replace(recipe, epochs=2, warmup_share=None, warmup_epochs=1)
    settled = whole.loop_options(7)
    assert (settled.iters, settled.warmup_iters) == (7, 4)
    with pytest.raises(ConfigError, match="warm-up of 1 epochs is 50 steps, and the run has 50"):
        dataclasses.replace(whole, epochs=1).loop_options(100)
    with pytest.raises(ConfigError, match="leave one out"):
        dataclasses.replace(recipe, warmup_epochs=1)
    late = dataclasses.replace(options, iters=51, warmup_iters=50)
    recipe = dataclasses.replace(recipe, options=late, warmup_share=None)
    assert recipe.loop_options(100).warmup_iters == 50
    with pytest.raises(
        ConfigError, match=r"warmup_iters is 50, and the run has 8 steps \(1\.6 epochs"
    ):
        recipe.loop_options(10)
    bounded = dataclasses.replace(recipe, epochs=3, steps_between=(60, 80))
    assert [bounded.loop_options(n).iters for n in (4, 50, 400)] == [60, 75, 80]

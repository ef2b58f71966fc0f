"""Steps under a task mask on Metal: as many dispatches, over fewer bytes."""

from tests.metal import launches, mask_steps


def test_a_masks_step_takes_the_same_dispatches_over_smaller_matrices():
    counts = []
    for share in (1.0, 0.5):
        model = mask_steps.masked_model(share)
        calls = launches.decode_step(model, 31)
        down = [call for call in calls if mask_steps.is_down(call, model)]
        assert len(down) == len(model.layers)
        counts.append(len(calls))
        assert model.layers[0].mlp.down_proj.weight.shape[1] == 416 * share
    assert counts[0] == counts[1]

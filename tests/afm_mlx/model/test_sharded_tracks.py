"""Ranks that hold a share of the tracks each compute what one process does, with one exchange per segment."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.model.parallel_tracks import Model
from afm_mlx.track_config import TrackConfig
from tests.tools.compare import assert_close
from tests.tools.rank_worker import start_ranks
from tests.tools.track_worker import made, results
from tests.tools.tracks import SMALL

CONFIG = TrackConfig(
    **SMALL | {"sparse_feed_forward_hidden_dim": 32, "dense_feed_forward_hidden_dim": 64},
    tracks_dispatch_norm="rms_norm",
    tracks_combine_norm="rms_norm",
)


def run_ranks(folder, size, tokens, *jobs):
    """What each rank found, for each job: a config, and whether the model is packed."""
    (folder / "jobs").write_bytes(pickle.dumps((tokens, jobs)))
    running = start_ranks(folder, size, ["-m", "tests.tools.track_worker", str(folder)])
    errors = [each.communicate(timeout=300)[1] for each in running]
    assert [each.returncode for each in running] == [0] * size, errors
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(size)]


@pytest.mark.parametrize(("size", "segment"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does(tmp_path, rng, size, segment):
    config = TrackConfig(**CONFIG.to_dict() | {"num_layers_per_track_per_sync_point": segment})
    tokens = rng.integers(1, 97, (2, 11))
    jobs = [(config, False), (config, True)]
    wanted = [results(made(*job), tokens) for job in jobs]
    assert len(wanted[0]) > 50
    assert len(wanted[1]) == 2
    for rank, of_jobs in enumerate(run_ranks(tmp_path, size, tokens, *jobs)):
        for found, arrays in zip(of_jobs, wanted, strict=True):
            assert found.pop("exchanges") == 8 // segment == config.num_segments
            for name, array in arrays.items():
                if ".layers." in name or "_norms." in name:  # this rank's tracks
                    array = np.split(array, size)[rank]
                assert_close(found.pop(name), array, 1e-5, name, least=1.0)
            assert not found


def test_ranks_that_cannot_share_tracks_evenly_are_refused():
    group, model = SimpleNamespace(rank=lambda: 1, size=lambda: 3), Model(CONFIG)
    says = "4 tracks, which 3 ranks can't share evenly; allowed numbers of ranks are 1, 2, 4"
    with pytest.raises(ConfigError, match=says):
        model.shard(group)
    model.shard(SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    assert model.model.group is None

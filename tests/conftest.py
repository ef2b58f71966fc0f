"""Random inputs from a seed that the report prints: 0, or what AFM_TEST_SEED says (`make fuzz` draws one)."""

import gc
import os
import signal

import afm_mlx  # noqa: F401  before mlx.core is imported, so that all tests run on the same BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest

SEED = int(os.environ.get("AFM_TEST_SEED") or 0)
# Tests of the self-test switch it on for themselves; elsewhere it would write to the user's cache folder.
os.environ.setdefault("AFM_MLX_SELFTEST", "0")
# `nohup` and scripts' background jobs are started with these ignored, which the command line would honour.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist's workers are processes of their own and must draw from the same seed.
os.environ["AFM_TEST_SEED"] = str(SEED)


def pytest_report_header(config):
    return f"seed of random inputs: AFM_TEST_SEED={SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("random inputs", f"repeat with AFM_TEST_SEED={SEED}"))


@pytest.fixture(autouse=True)
def mlx_draws_from_the_seed(rng):
    """What draws from MLX's own state (the layers of `mlx.nn` for one) repeats with the run's seed, too."""
    mx.random.seed(int(rng.spawn(1)[0].integers(2**32)))


@pytest.fixture
def exact_memory():
    """MLX's figures are sums of what arrays need: none lies in a larger buffer that was kept from others."""
    gc.collect()
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator of the run's seed and the test's name, so that tests don't depend on their order."""
    return np.random.default_rng([SEED, *request.node.nodeid.encode()])

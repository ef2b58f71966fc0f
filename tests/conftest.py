"""Random inputs from a seed: 0, or what AFM_TEST_SEED says (`make fuzz` draws one).

A failure prints the command that repeats it, and the test's variables: a test may go through many cases.
"""

import functools
import gc
import os
import reprlib
import shlex
import signal
import ssl
from pathlib import Path

import afm_mlx  # noqa: F401  before mlx.core is imported, so that all tests run on the same BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.replay import keep_compiler_out

SEED = int(os.environ.get("AFM_TEST_SEED") or 0)
# Tests of the self-test switch it on for themselves; elsewhere it would write to the user's cache folder.
os.environ.setdefault("AFM_MLX_SELFTEST", "0")
os.environ.setdefault("AFM_MLX_CACHE", str(Path(__file__).parent.parent / "build" / "cache"))
os.environ.setdefault("HF_DATASETS_CACHE", f"{os.environ['AFM_MLX_CACHE']}/datasets")  # of lm-eval
# Each HTTP client reads the system's certificates, which takes longer than a small answer.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# `nohup` and scripts' background jobs are started with these ignored, which the command line would honour.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist's workers are processes of their own and must draw from the same seed.
os.environ["AFM_TEST_SEED"] = str(SEED)


def pytest_report_header(config):
    return f"seed of random inputs: AFM_TEST_SEED={SEED}"


def pytest_collection_finish():
    """What all imports have made will stay, so collecting garbage need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        if values := _variables(item, call):
            report.sections.append(("variables of the test", values))
        report.sections.append(("repeat with", _command(item)))
    return report


@pytest.fixture
def compiled():
    """Switch `mx.compile` on, as it is on a GPU: on a CPU this takes a C++ compiler, and a while."""
    mx.enable_compile()
    yield
    keep_compiler_out()


def _name(item):
    return item.nodeid.partition("@")[0] if item.get_closest_marker("xdist_group") else item.nodeid


def _variables(item, call):
    plain = (str, bytes, int, float, list, tuple, dict, type(None))
    frames = [e for e in call.excinfo.traceback if e.name == getattr(item, "originalname", None)]
    return "\n".join(
        f"{name} = {reprlib.repr(value)}"
        for frame in frames
        for name, value in frame.locals.items()
        if type(value) in plain and name.isidentifier()
    )


def _command(item):
    names = ("AFM_TEST_SEED", "AFM_HOSTILE_CASES", "OMP_NUM_THREADS")
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    marked = ["-m", "slow"] if item.get_closest_marker("slow") else []
    words = [".venv/bin/python", "-m", "pytest", *marked, _name(item)]
    return " ".join([*settings, shlex.join(words)])


@pytest.fixture(autouse=True)
def mlx_draws_from_the_seed(rng):
    """What draws from MLX's own state (the layers of `mlx.nn` for one) repeats with the run's seed, too."""
    mx.random.seed(int(rng.spawn(1)[0].integers(2**32)))


@pytest.fixture
def exact_memory():
    """MLX's figures are sums of what arrays need: none is in a larger buffer that was kept from others."""
    gc.collect()
    gc.freeze()  # so that collecting again and again looks only at what the test makes
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator of the run's seed and the test's name, so that tests don't depend on their order."""
    return np.random.default_rng([SEED, *_name(request.node).encode()])

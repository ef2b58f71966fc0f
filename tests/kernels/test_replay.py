"""Graphs that are built once and replayed, and no C++ compiler on a CPU."""

import os
import subprocess
import sys
import textwrap

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.kernels import dispatch, replay
from afm_mlx.kernels.cpu import extension

replayed = pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
COMPILERS = ("g++", "c++", "gcc", "cc", "clang", "clang++", "ld", "as")


def counted(function):
    """The function, and how often Python has called it."""
    calls = []

    def called(*args):
        calls.append(args)
        return function(*args)

    return called, calls


@replayed
def test_a_graph_is_built_once_and_follows_arguments_and_state(rng):
    draw = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    state = {"of": [{"weight": draw(4, 4), "name": "a"}], "bias": draw(4), "bits": 8}

    def function(x, pair, sign):
        y = x @ state["of"][0]["weight"] + state["bias"] * (1 if sign == "+" else -1)
        high, low = mx.split(mx.sort(y + pair[0]), 2, axis=-1)  # an operation of two outputs
        return (high, [low, pair[1]]), mx.array(2.0) * y

    called, calls = counted(function)
    again = replay.Replay(called, state)
    for built, (rows, sign) in enumerate([(1, "+"), (1, "-"), (3, "-")], start=1):
        for _ in range(3):
            x, pair = draw(rows, 4), [draw(4), draw(2)]
            state["of"][0]["weight"], state["bias"] = draw(4, 4), draw(4)
            got, wanted = again(x, pair, constants=(sign,)), function(x, pair, sign)
            assert type(got) is type(wanted)
            assert type(got[0][1]) is list
            for (_, a), (_, b) in zip(tree_flatten(got), tree_flatten(wanted), strict=True):
                assert mx.array_equal(a, b)
        assert len(calls) == built


@replayed
def test_other_types_and_states_get_graphs_of_their_own():
    state = {"weight": mx.ones(3)}
    called, calls = counted(lambda x: x * state["weight"])
    again = replay.Replay(called, state)
    assert again(mx.ones(3, mx.float16)).dtype == again(mx.ones(3)).dtype == mx.float32
    state["weight"] = mx.full((3,), 2, mx.int32)
    assert again(mx.ones(3, mx.float16)).tolist() == [2, 2, 2]
    assert again(mx.ones(3, mx.float16)).dtype == mx.float16
    assert len(calls) == 3


@replayed
def test_a_function_that_can_not_be_replayed_is_refused_and_leaves_the_state_as_it_was():
    state, other = {"weight": mx.ones(3)}, mx.ones(3)
    weight = state["weight"]
    for function, error, message in [
        (lambda x: x if x.sum() > 0 else -x, RuntimeError, "while the graph"),
        (lambda x: x + weight, ValueError, "in another way than as its argument"),
        (lambda x: x + np.array(state["weight"]), RuntimeError, "while the graph"),
    ]:
        with pytest.raises(error, match=message):
            replay.Replay(function, state)(other)
        assert state["weight"] is weight or mx.array_equal(state["weight"], weight)
    assert replay.Replay(lambda x: x + state["weight"], state)(other).tolist() == [2, 2, 2]


def test_the_compiler_is_out_on_a_cpu_and_back_on_a_gpu(monkeypatch):
    switched = []
    monkeypatch.setattr(mx, "disable_compile", lambda: switched.append("off"))
    monkeypatch.setattr(mx, "enable_compile", lambda: switched.append("on"))
    monkeypatch.setattr(replay, "_is_compiler_out", False)
    for device in ("gpu", "cpu", "gpu", "gpu"):
        monkeypatch.setattr(dispatch, "device", lambda device=device: device)
        replay.keep_compiler_out()
    assert switched == ["off", "on"], "a GPU's own setting is left alone"


SCRIPT = """
import sys
sys.modules["torch"] = None  # transformers would import it, which takes a second
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler as theirs
from afm_mlx import make_sampler
from afm_mlx.cli import main
from afm_mlx.kernels import dispatch
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.step import TrainingStep
from tests.tools.engines import tiny
from tests.tools.training import ToyBatches, ToyModel, toy_loss

assert dispatch.device() == "cpu"
rng = np.random.default_rng(0)
prompt = mx.array([[3, 1, 4]])
for kind in ("2-bit", "float"):
    model = tiny(rng, kind, 8)
    cache = model.make_cache()
    mx.eval(model(prompt, cache), model.greedy(prompt[:, :1], cache), model(prompt[:, :1], cache))
sizes = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2, vocab_size=64)
zoo = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **sizes))
logits = zoo(prompt)[:, -1]
mx.eval(logits, nn.gelu_approx(logits), nn.silu(logits))
for sampler in (make_sampler, theirs):
    mx.eval(sampler(temp=1.0, top_p=0.5, top_k=9, min_p=0.1)(logits - mx.logsumexp(logits)))
for micro_batches in (1, 2):
    model = ToyModel(dropout=0.1, seed=3).train()
    step = TrainingStep(model, toy_loss, AdamW(0.01), max_norm=1.0, ema_decay=0.9)
    step.evaluate(step([ToyBatches(1)(i) for i in range(micro_batches)]))
mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(logits))
assert main(["generate", "--prompt", "hey", "--max-tokens", "3"]) == 0
"""


@pytest.mark.skipif(dispatch.device() == "gpu", reason="a GPU's kernels are compiled by MLX")
@pytest.mark.parametrize("native", [True, False])
def test_no_compiler_is_started_on_a_cpu(tmp_path, native):
    """Decoding, sampling, a zoo model and training, with every compiler's name a program that leaves a note."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    for name in COMPILERS:
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/started\nexit 0\n')
        program.chmod(0o755)
    subprocess.run(["g++", "--version"], env={"PATH": str(tmp_path / "bin")}, check=True)
    assert (tmp_path / "started").read_text().count("g++ --version") == 1, "a note is left"
    env = os.environ | {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": os.getcwd(),
        **({} if native else {"AFM_MLX_NATIVE": "0"}),
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").read_text().count("\n") == 1, "nothing but the test's own"
    assert not list((tmp_path / "tmp").rglob("*.so"))

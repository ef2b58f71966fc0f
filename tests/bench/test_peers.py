"""The comparison with other programs: what becomes of their answers, and all of it on a small model."""

import importlib
import importlib.util
import json
import sys

import numpy as np
import pytest

from afm_mlx.loading.load import load_model
from afm_mlx.measure.machine import Bandwidth
from bench import peer_afm, peer_zoo, peers
from bench.peer_models import EXACT, HERE, INT8, MLX_LM
from bench.peer_protocol import Peer, PeerError

WORKER = """
import sys
sys.path.insert(0, {folder!r})
from peer_protocol import serve
print("chatter", file=sys.stderr)
def double(value): return {{"value": 2 * value}}
def fail(): raise KeyError("x")
def die(): sys.exit(3)
serve({{"weight_bytes": 5, "threads": __import__("os").environ["AFM_MLX_THREADS"]}}, locals())
"""


def worker(body=WORKER):
    return [sys.executable, "-c", body.format(folder=str(HERE))]


def test_a_worker_answers_fails_and_ends(rng):
    peer = Peer("p", worker(), threads=3)
    try:
        assert peer.hello == {"weight_bytes": 5, "threads": "3"}
        value = int(rng.integers(1000))
        with pytest.raises(PeerError, match="KeyError: 'x'"):
            peer.measure("fail")
        assert peer.measure("double", value=value) == {"value": 2 * value}
        with pytest.raises(PeerError, match="status 3"):
            peer.measure("die")
    finally:
        peer.close()


def test_a_peer_that_can_t_start_is_left_out(capfd):
    commands = {
        "missing": ["/no/such/python"],
        "broken": worker("raise SystemExit('no module of that name')"),
        "without warm-up": worker(),
        "good": worker(WORKER.replace("double(value)", "warm_up()").replace("2 * value", "1")),
    }
    with peers.started(commands, threads=1) as found:
        assert list(found) == ["good"]
    err = capfd.readouterr().err
    assert "missing is left out: /no/such/python can't be run" in err
    assert "broken is left out: it ended with status 1" in err
    assert "no module of that name" in err
    assert "without warm-up is left out: KeyError" in err


class FakePeer:
    """Answers from a stock of random speeds."""

    def __init__(self, name, rng, log):
        self.name, self.hello = name, {"weight_bytes": 10}
        self._rng, self._log = rng, log
        self.given = {}

    def measure(self, what, **arguments):
        self._log.append(self.name)
        if what == "memory":
            return {"peak_resident_bytes": 7}
        speed = float(self._rng.uniform(1, 9))
        self.given.setdefault((what, *sorted(arguments.items())), []).append(speed)
        return {"tokens_per_second": speed}


@pytest.mark.parametrize("bench", ["adapters", "busy", "constraints", "peers", "server"])
def test_no_rounds_are_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [bench, "--rounds", "0"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{bench}").main()
    assert "argument --rounds: 0 is out of range; allowed is 1 or more" in capsys.readouterr().err


def test_peers_take_turns_and_medians_are_over_rounds(rng, capsys):
    log = []
    found = {name: FakePeer(name, rng, log) for name in (EXACT, "llama.cpp X", MLX_LM)}
    plan = peers.Plan(rounds=3)
    medians, answers = peers.measure(found, plan)
    # Both are asked the same, one after the other; ours also far into the context.
    assert log[:7] == [EXACT, "llama.cpp X"] * 3 + [EXACT]
    assert log[:7] * 3 == log[:21]
    assert medians[EXACT]["prefill"] == np.median(found[EXACT].given["prefill", ("tokens", 512)])
    assert len(answers["llama.cpp X"]["decode"]) == 3
    assert "deep" not in medians["llama.cpp X"]
    assert medians["llama.cpp X"]["memory_peak_resident_bytes"] == 7
    deep = found[EXACT].given["decode", ("depth", 4096), ("rows", 1), ("tokens", 32)]
    assert medians[EXACT]["deep"] == np.median(deep)


@pytest.mark.usefixtures("no_torch")
def test_the_whole_comparison_on_small_models(config, zoo_sizes, tmp_path, monkeypatch, capsys):
    """Ours exact and int8, each in a process of its own; what it writes is what it prints."""
    monkeypatch.setitem(peer_afm.PRESETS, "afm-3b", config)
    zoo = peer_zoo.CONFIGS["qwen3-4b"] | zoo_sizes
    monkeypatch.setitem(peer_zoo.CONFIGS, "qwen3-4b", zoo)
    monkeypatch.setattr(peers, "measure_bandwidth", lambda threads: Bandwidth(1e9, "by hand"))
    sizes = ["--prompt", "8", "--tokens", "3", "--rows", "2", "--depth", "4", "--deep", "16"]
    sizes += ["--rounds", "1", "--threads", "1", "--skip", MLX_LM]
    peers.main([*sizes, "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")])
    out = capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "peers.json").read_text())["models"]
    assert list(facts) == ["afm-3b", "qwen3-4b"]
    has_plot = importlib.util.find_spec("matplotlib") is not None  # of the extra `bench`
    for name, own in facts.items():
        assert set(own["medians"]) == {EXACT, INT8}
        for figures in own["medians"].values():
            assert {"prefill", "decode", "batch", "deep", "load_seconds"} <= set(figures)
            assert f"{figures['prefill']:.1f}" in out
        if sys.platform == "linux":
            assert 0 <= own["processors_busy_with_others"] < 1000
        assert (tmp_path / "out" / f"peers-{name}.png").exists() == has_plot
    assert facts["afm-3b"]["config"] == config.to_dict()
    assert facts["qwen3-4b"]["config"] == zoo
    for figures in facts["afm-3b"]["medians"].values():
        assert figures["decode_bytes_per_step"] > figures["weight_bytes"]
    assert "1.0 GB/s (by hand)" in out
    model = load_model(tmp_path / "work" / f"afm-3b-{config.num_layers}" / "afm-mlx")
    assert (model.model.embedding.bits, model.layers[0].mlp.up_proj.bits) == (4, 2)

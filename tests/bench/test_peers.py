"""The comparison with other programs: what they are given to run, and what becomes of their answers."""

import json
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.loading.load import load_model
from afm_mlx.model.model import Model
from bench import peers
from bench.peer_gguf import (
    FORMATS,
    matrix_parameters,
    matrix_shapes,
    quantized_bytes,
    random_blocks,
    write_gguf,
)
from bench.peer_protocol import Peer, PeerError
from bench.peers import EXACT, INT8, MLX_LM, Plan, Target, targets
from tests.tools.models import random_config

# Widths that every format's blocks divide.
SIZES = {"hidden_dim": 256, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 3.0}


@pytest.fixture
def config(rng):
    layers = int(rng.integers(2, 5))
    reuse = int(rng.integers(1, layers))
    return random_config(rng, **SIZES, num_layers=layers, num_kv_reuse_layers=reuse)


# -- llama.cpp's model


@pytest.mark.parametrize("format", FORMATS)
def test_random_blocks_are_weights_of_a_fresh_model(format, rng):
    gguf = pytest.importorskip("gguf", reason="the extra `bench` is not installed")
    rows, inputs = 64, 256 * int(rng.integers(1, 4))
    blocks = random_blocks(format, rows, inputs, rng)
    assert blocks.nbytes == quantized_bytes(format, rows, inputs)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format])
    assert values.shape == (rows, inputs)
    assert 0.6 < values.std() * inputs**0.5 < 1.6
    assert len(np.unique(values[0])) >= 4


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_must_be_full(format, rng):
    with pytest.raises(
        ValueError, match=rf"{format} stores \d+ weights in a block, which 72 inputs"
    ):
        random_blocks(format, 3, 72, rng)


@pytest.mark.parametrize("body", ["TQ2_0", "Q2_K"])
def test_the_file_holds_the_same_matrices(body, config, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the extra `bench` is not installed")
    write_gguf(tmp_path / "model.gguf", config, body)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {t.name: t for t in reader.tensors}
    kinds = {name: t.tensor_type.name for name, t in tensors.items()}
    assert kinds.pop("token_embd.weight") == "Q4_0"
    assert {kinds[name] for name in kinds if "norm" not in name} == {body}
    assert {kinds[name] for name in kinds if "norm" in name} == {"F32"}
    for name, (rows, inputs) in matrix_shapes(config).items():
        for block in range(config.num_layers):
            assert list(tensors[f"blk.{block}.{name}.weight"].shape) == [inputs, rows]
    stored = sum(
        int(t.n_elements) for n, t in tensors.items() if n.startswith("blk.") and "norm" not in n
    )
    assert stored == matrix_parameters(config)
    # Those of the AFM model, and a key and a value projection in each block that has none.
    d, width = config.hidden_dim, config.num_kv_heads * config.head_dim
    shapes = {n: a.shape for n, a in tree_flatten(Model(config).parameters())}
    blocks = sum(
        r * k for n, (r, k) in ((n, s) for n, s in shapes.items() if len(s) == 2) if "layers" in n
    )
    assert stored == blocks + config.num_kv_reuse_layers * 2 * d * width
    assert reader.get_field("llama.attention.head_count_kv").contents() == config.num_kv_heads


def test_operations_of_a_prompt_token(config):
    shapes = {n: a.shape for n, a in tree_flatten(Model(config).parameters()) if a.ndim == 2}
    writing = sum(r * k for n, (r, k) in shapes.items() if n.startswith("model.layers"))
    reuse = sum(r * k for n, (r, k) in shapes.items() if n.startswith("model.kv_reuse_layers"))
    assert peers.matrix_flops(config, EXACT) == 2 * writing
    assert peers.matrix_flops(config, MLX_LM) == 2 * (writing + reuse)
    assert peers.matrix_flops(config, "llama.cpp Q2_K") == 2 * matrix_parameters(config)


# -- our folder, and mlx-lm's model


def test_our_folder_has_random_codes_of_the_real_shapes(config, tmp_path):
    peers.write_folder(tmp_path / "model", config)
    model = load_model(tmp_path / "model")
    assert model.args == config
    assert model.model.embedding.bits == 4
    assert model.model.layers[0].mlp.up_proj.bits == 2
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()


def test_mlx_lm_s_model_is_packed_and_runs(config):
    from bench.peer_mlx_lm import quantized_model

    sizes = {
        k: v
        for k, v in config.to_dict().items()
        if k not in ("model_type", "kv_bits", "context_length")
    }
    model = quantized_model(sizes)
    shapes = {n: a.shape for n, a in tree_flatten(Model(config).parameters()) if a.ndim == 2}
    for name, array in tree_flatten(model.parameters()):
        if name.endswith(".weight") and array.ndim == 2:
            bits = 4 if "embedding" in name else 2
            assert array.dtype == mx.uint32
            assert array.shape == (shapes[name][0], shapes[name][1] * bits // 32)
    logits = model(mx.array([[1, 2, 3]]), cache=model.make_cache())
    assert logits.shape == (1, 3, config.vocab_size)
    assert np.isfinite(np.array(logits)).all()


def test_shrunk_keeps_the_share_of_reuse(rng):
    config = random_config(rng, num_layers=56, num_kv_reuse_layers=21)
    assert (peers.shrunk(config, 8).num_layers, peers.shrunk(config, 8).num_kv_reuse_layers) == (
        8,
        3,
    )
    assert peers.shrunk(config, 1).num_kv_reuse_layers == 0


# -- the pipe

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
    return [sys.executable, "-c", body.format(folder=str(peers.HERE))]


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


def test_peers_take_turns_and_medians_are_over_rounds(rng, capsys):
    log = []
    found = {name: FakePeer(name, rng, log) for name in (EXACT, "llama.cpp X", MLX_LM)}
    plan = Plan(rounds=3)
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


def test_bystanders_are_what_is_busy_and_not_ours(monkeypatch, rng):
    start = rng.uniform(0, 100, 3)
    clock, others, mine = rng.uniform(1, 5, 3)
    readings = iter([tuple(start), tuple(start + np.array([clock, others + mine, mine]))])
    monkeypatch.setattr(peers.Bystanders, "_now", staticmethod(lambda: next(readings)))
    assert peers.Bystanders().processors() == pytest.approx(others / clock)


# -- targets


def test_targets_compare_with_the_best_of_llama(rng):
    speeds = {name: float(value) for name, value in zip("abcd", rng.uniform(5, 50, 4), strict=True)}
    medians = {
        EXACT: {"decode": 10.0, "prefill": 90.0, "batch": 45.0, "deep": 7.0, "load_seconds": 1.6},
        INT8: {"decode": 20.0, "prefill": 190.0, "decode_bytes_per_step": 9e8},
        "llama.cpp A": {"decode": speeds["a"], "prefill": speeds["b"]},
        "llama.cpp B": {"decode": speeds["c"], "prefill": speeds["d"]},
    }
    medians[EXACT] |= {
        "memory_peak_memory_bytes": 115.0,
        "memory_peak_resident_bytes": 130.0,
        "memory_weight_bytes": 90.0,
        "memory_cache_bytes": 10.0,
    }
    found = {t.name: t for t in targets(medians, limit=30e9)}
    best = max(speeds["a"], speeds["c"])
    exact = found[f"{EXACT}: decode over llama.cpp's best"]
    assert exact.value == pytest.approx(10 / best)
    assert exact.met == (10 / best >= 1.2)
    prefill = found[f"{INT8}: prefill over llama.cpp's best"]
    assert prefill.value == pytest.approx(190 / max(speeds["b"], speeds["d"]))
    verdicts = {
        f"{EXACT}: batch over one row": (4.5, True),
        f"{EXACT}: decode deep in the context": (0.7, False),
        f"{EXACT}: decode over mlx-lm": (None, None),
        f"{INT8}: batch over one row": (None, None),
        f"{INT8}: share of the measured bandwidth": (0.6, True),
        "peak memory over weights and cache": (1.15, True),
        "the whole process's, likewise": (1.3, False),
        "loading from the page cache": (1.6, False),
    }
    for name, (value, met) in verdicts.items():
        assert found[name].value == (None if value is None else pytest.approx(value))
        assert found[name].met is met


def test_tables_show_every_peer_and_every_target(config):
    medians = {
        EXACT: {"weight_bytes": 1e9, "decode": 20.0, "decode_bytes_per_step": 2e9, "prefill": 10.0},
        "llama.cpp A": {"weight_bytes": 3e9, "decode": 2.0, "load_seconds": float("nan")},
    }
    rows = peers.table(medians, config)
    assert {len(row) for row in rows} == {9}
    columns = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert columns[EXACT]["decode GB/s"] == "40.00"
    assert columns[EXACT]["deep tok/s"] == "-"
    assert columns["llama.cpp A"]["decode GB/s"] == "6.00"
    assert columns["llama.cpp A"]["load s"] == "-"
    verdicts = [Target("a", 2.0, 1.5), Target("b", 2.0, 1.5, True, "s"), Target("c", None, 1)]
    assert [row[-1] for row in peers.target_rows(verdicts)[1:]] == ["met", "missed", "not measured"]
    lines = peers.markdown(peers.target_rows(verdicts)).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    medians = {
        EXACT: {"decode": 20.0, "prefill": 100.0, "decode_bytes_per_step": 9e8},
        "llama.cpp A": {"prefill": 50.0},
    }
    peers.plot(tmp_path / "p.png", medians, 3e10, "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_whole_comparison_on_a_small_model(config, tmp_path, monkeypatch, capsys):
    """Ours exact and int8, each in a process of its own; what it writes is what it prints."""
    from afm_mlx.measure.bandwidth import Bandwidth

    monkeypatch.setitem(peers.PRESETS, "afm-3b", config)
    monkeypatch.setattr(peers, "measure_bandwidth", lambda threads: Bandwidth(1e9, "by hand"))
    sizes = ["--prompt", "8", "--tokens", "3", "--rows", "2", "--depth", "4", "--deep", "16"]
    sizes += ["--rounds", "1", "--threads", "1", "--skip", MLX_LM]
    peers.main([*sizes, "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")])
    out = capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert set(facts["medians"]) == {EXACT, INT8}
    for figures in facts["medians"].values():
        assert {"prefill", "decode", "batch", "deep", "load_seconds"} <= set(figures)
        assert figures["decode_bytes_per_step"] > figures["weight_bytes"]
        assert f"{figures['prefill']:.1f}" in out
    assert facts["config"] == config.to_dict()
    assert "1.0 GB/s (by hand)" in out
    if sys.platform == "linux":
        assert 0 <= facts["processors_busy_with_others"] < 1000

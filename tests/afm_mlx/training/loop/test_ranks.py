"""Several ranks train as one process does, end together, and lose nothing when one of them is killed."""

import dataclasses
import signal
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import afm_mlx
from afm_mlx import ranks as ranks_module
from afm_mlx.errors import ConfigError
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.samples import Sample
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.contrastive_training import ContrastiveTraining
from afm_mlx.training.methods.ifp_training import IFPTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import QATTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import train_by
from afm_mlx.training.pruning.predicted_mask import predict_mask
from afm_mlx.training.pruning.prune import prune
from tests.tools.cases import each
from tests.tools.cli import lines, write_folder
from tests.tools.compare import assert_close, assert_within
from tests.tools.rank_worker import Job, run_ranks, start_ranks
from tests.tools.training_data import TRAINABLE, write_data

OPTIONS = TrainingOptions(
    # A gradient that is nothing but rounding errors becomes a step of Adam: not with this eps.
    iters=4,
    learning_rate=1e-3,
    eps=1e-4,
    steps_per_eval=2,
    save_every=2,
    steps_per_report=2,
    val_batches=-1,
)


@pytest.fixture
def floats(tmp_path, spm_bpe, rng):
    """A float model: int8 keys and values would turn a last bit into a step of their grid."""
    return write_folder(
        tmp_path / "floats", spm_bpe, rng, dataclasses.replace(TRAINABLE, kv_bits=None)
    )


@pytest.fixture
def recipe(floats, tmp_path, rng):
    # 9 samples, 4 to a batch: the last batch has fewer rows than there are ranks.
    data = write_data(tmp_path / "data", rng)
    return Recipe(data, OPTIONS, floats, batch_size=4, max_seq_length=96, packing=False, test=True)


@pytest.fixture
def preferences(recipe, tmp_path):
    folder = tmp_path / "preferences"
    folder.mkdir()
    for split, count in (("train", 5), ("valid", 3), ("test", 3)):
        records = [
            {"prompt": f"say {i}", "chosen": f"{i}", "rejected": "no " * (i + 1)}
            for i in range(count)
        ]
        lines(folder / f"{split}.jsonl", *records)
    return dataclasses.replace(recipe, data=folder, packing=None)


def best(path, method):
    """The best weights of a run, in the precision of training, with the step and the validation loss."""
    return RunFolder(method.default_run_path(path)).load_best()


def check_as_one_process(job):
    """Train in one process, too, and compare the best weights."""
    kind, alone = job.method.kind, train_by(job.method, job.recipe, Path(f"{job.path}-alone"))
    (weights, state), (wanted, alone_state) = (
        best(path, job.method) for path in (job.path, alone.path)
    )
    assert state["step"] == alone_state["step"], kind
    assert state["valid_loss"] == pytest.approx(alone_state["valid_loss"], rel=1e-5), kind
    assert weights.keys() == wanted.keys()
    for key, array in wanted.items():
        assert_within(weights[key], array, 1e-6, f"{kind}: {key}")


def check_killed(job, rank, ended):
    """Check how both ranks ended after the death of one before its fourth step.

    Rank 0 saves the last step when it loses another rank.
    """
    assert ended[rank].status == -signal.SIGKILL
    lost = ended[1 - rank].errors[-1]
    assert lost.startswith(f"RankLostError: Rank {1 - rank} of 2 has lost another rank")
    assert ("The last checkpoint is of step 3: " in lost and "--resume" in lost) == rank
    assert RunFolder(job.path / "run").steps()[-1] == (3 if rank else 2)


def check_resumes(job, unbroken, folder):
    """Resume on two ranks, and compare with an unbroken run, to the bit."""
    ended = run_ranks(folder, 2, dataclasses.replace(job, resume=True))
    assert [rank.errors for rank in ended] == [[""]] * 2, ended
    found, wanted = ((each.path / "adapters.safetensors").read_bytes() for each in (job, unbroken))
    assert found == wanted


@pytest.fixture
def breakable(recipe, tmp_path):
    """Two equal jobs, of which one can be broken."""
    options = dataclasses.replace(OPTIONS, steps_per_eval=4)
    recipe = dataclasses.replace(recipe, options=options, test=False)
    method = LoRATraining(rank=2, dropout=0.2, save_dtype="float32")
    return [Job(method, recipe, tmp_path / name) for name in ("unbroken", "broken")]


SHORT = dataclasses.replace(OPTIONS, iters=3, steps_per_eval=3, save_every=3)


def test_two_ranks(recipe, preferences, breakable, tmp_path, spm_bpe, rng):
    """One start of processes, for many jobs: they train, stop, differ, and lose a rank."""
    lora = LoRATraining(rank=2, scale=2.0, save_dtype="float32")
    options = dataclasses.replace(SHORT, grad_accumulation_steps=2, ema_decay=0.8)
    preferences = dataclasses.replace(preferences, options=SHORT)
    pairs = PreferenceTraining(rank=2, scale=2.0)
    trained = [
        Job(lora, dataclasses.replace(recipe, options=options), tmp_path / "ragged"),
        Job(pairs, preferences, tmp_path / "pairs"),
    ]
    short = dataclasses.replace(recipe, options=SHORT)
    stopped = Job(lora, short, tmp_path / "stopped", stopped=1)
    other = write_folder(
        tmp_path / "other/floats", spm_bpe, rng, dataclasses.replace(TRAINABLE, kv_bits=None)
    )
    changes = {
        "model_weights": {"model": other},
        "data": {"data": write_data(tmp_path / "others", rng)},
        "learning_rate": {"options": dataclasses.replace(OPTIONS, learning_rate=2e-3)},
    }
    differing = [Job(lora, recipe, tmp_path / name, changes={1: changes[name]}) for name in changes]
    unbroken, broken = breakable
    killed = dataclasses.replace(broken, killed=(1, 4))
    ended = run_ranks(tmp_path, 2, *trained, stopped, *differing, unbroken, killed)
    check_killed(broken, 1, ended)
    for rank in ended:
        *whole, interrupted = rank.errors[:3]
        assert whole == ["", ""], rank.stderr
        assert interrupted == "KeyboardInterrupt: "
        for name, error in zip(changes, rank.errors[3:6], strict=True):
            assert error.startswith("ConfigError: The ranks differ: "), error
            assert f"{name} is " in error
        assert rank.errors[6] == ""
    assert not any((job.path / "run").exists() for job in differing)
    for job in trained:
        check_as_one_process(job)
    check_resumes(broken, unbroken, tmp_path)
    # Any number of ranks resumes, such as one.
    assert RunFolder(stopped.path / "run").steps() == [1]
    train_by(lora, short, stopped.path, resume=True)
    check_as_one_process(stopped)


@pytest.mark.slow
def test_a_run_that_lost_rank_0_resumes_from_its_last_checkpoint(breakable, tmp_path):
    unbroken, broken = breakable
    ended = run_ranks(tmp_path, 2, unbroken, dataclasses.replace(broken, killed=(0, 4)))
    check_killed(broken, 0, ended)
    check_resumes(broken, unbroken, tmp_path)


@pytest.mark.slow
def test_three_ranks_train_as_one_process_does(recipe, tmp_path):
    """In a ring of three the neighbours of a rank are two others."""
    recipe = dataclasses.replace(recipe, options=SHORT)
    options = dataclasses.replace(SHORT, grad_accumulation_steps=2, ema_decay=0.8)
    taught = dataclasses.replace(
        recipe, packing=True, options=options, teacher="self", distillation_weight=0.5
    )
    jobs = [
        Job(LoRATraining(rank=2, scale=2.0), recipe, tmp_path / "lora"),
        Job(QATTraining(), taught, tmp_path / "qat"),
    ]
    for rank in run_ranks(tmp_path, 3, *jobs):
        assert (rank.errors, rank.status) == (["", ""], 0), rank.stderr
    for job in jobs:
        check_as_one_process(job)


LATE = """
import sys
from afm_mlx import ranks
ranks.JOIN_SECONDS = 1
ranks.join_ranks()
"""


@each("present", [0, 1])
def test_a_rank_that_is_alone_says_so_and_ends(tmp_path, present):
    running = start_ranks(tmp_path, 2, ["-c", LATE])
    running[1 - present].kill()
    texts = [process.communicate(timeout=30)[1] for process in running]
    assert running[present].returncode == -signal.SIGKILL
    assert f"error: rank {present} has waited 1 s, and not all ranks are there" in texts[present]


def test_joining_ranks_compare_their_versions(monkeypatch):
    found = []
    monkeypatch.setattr(mx.distributed, "init", lambda: Group(0, 2))
    monkeypatch.setattr(Ranks, "check_alike", lambda self, facts: found.append(facts))
    assert ranks_module.join_ranks.__wrapped__().size == 2
    assert found == [{"afm-mlx": afm_mlx.__version__, "mlx": mx.__version__}]


def command(recipe, path):
    """The arguments of Python for a short training by the command."""
    return ["-m", "afm_mlx", "lora", "--model", str(recipe.model), "--data", str(recipe.data), "--iters", "2",
            "--batch-size", "2", "--max-seq-length", "96", "--adapter-path", str(path)]  # fmt: skip


def check_printed(text, path):
    assert text.count("Saved to") == 1, text
    assert text.count("Ranks: 2, which split the rows of each batch") == 1
    assert text.count("exchanges ") == 1
    assert (path / "adapters.safetensors").exists()


def test_the_command_prints_once(recipe, tmp_path):
    running = start_ranks(tmp_path, 2, command(recipe, tmp_path / "adapter"))
    texts = [process.communicate(timeout=60)[0] for process in running]
    check_printed("".join(texts), tmp_path / "adapter")


@pytest.mark.slow  # mlx.launch polls without a pause: 4 s of processor time in 3 s
def test_the_launcher_of_mlx_starts_ranks(recipe, tmp_path):
    launch = Path(sys.executable).with_name("mlx.launch")
    flags = ["--backend", "ring", "-n", "2", "--starting-port", "42424"]
    run = subprocess.run(
        [str(launch), *flags, sys.executable, *command(recipe, tmp_path / "adapter")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    check_printed(run.stdout, tmp_path / "adapter")


# -- shares


class Group:
    """What `Ranks` asks of a group."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def batches_of(rng, packed):
    lengths = rng.integers(2, 30, 11)
    samples = [
        Sample(rng.integers(1, 99, n).tolist(), [0.0] + [1.0] * (n - 1), f"line {i}")
        for i, n in enumerate(lengths)
    ]
    return Batches(samples, batch_size=4, length=64, packed=packed, seed=1)


def targets_of(batch):
    """(token, successor, weight) of all targets."""
    flat = np.array(batch.inputs).reshape(-1)
    columns = map(np.array, (batch.labels, batch.weights))
    rows = zip(flat[np.array(batch.positions)], *columns, strict=True)
    return sorted(row for row in rows if row[2] > 0)


@each("packed", [True, False])
@each("size", [2, 3])
def test_the_shares_of_a_batch_are_the_batch(rng, packed, size):
    whole = batches_of(rng, packed)
    shares = [Ranks(Group(rank, size)).share(whole) for rank in range(size)]
    for step in range(2 * whole.per_epoch):
        parts = [share(step) for share in shares]
        assert sorted(row for part in parts for row in targets_of(part)) == targets_of(whole(step))
        assert all(len(part.inputs) == -(-4 // size) for part in parts)


@each("method", [PreferenceTraining(), RewardTraining()])
def test_the_losses_of_shares_add_up(preferences, method):
    source = ModelSource.open(preferences.model)
    whole, loss = method.read_split(preferences, source, "train"), method.test_loss()
    model = source.load()
    method.prepare(model, source, whole, 0)
    if isinstance(method, PreferenceTraining):
        whole = whole.with_reference(np.full(whole.n_scored, -1, np.float32))
    # 5 pairs in two batches: the second one has no pair for the third rank.
    shares = [Ranks(Group(rank, 3)).share(whole) for rank in range(3)]
    weights = set()
    for step in range(whole.per_epoch):
        wanted, metrics = loss(model, whole(step))
        parts = [loss(model, share(step)) for share in shares]
        weights |= {share(step).weights.sum().item() for share in shares}
        assert_close(sum(part for part, _ in parts), wanted, 1e-5)
        for name, value in metrics.items():
            assert_close(sum(found[name] for _, found in parts), value, 1e-5, name, least=1e-3)
    assert weights == {0, 1}


def test_one_process_has_the_whole(rng):
    whole = batches_of(rng, True)
    assert ALONE.share(whole) is whole
    assert ALONE.gather({"a": 1}) == [{"a": 1}]
    assert not ALONE.any(False)
    assert ranks_module.join_ranks() is ALONE


def test_what_can_not_be_split_is_refused(rng, recipe, preferences, monkeypatch):
    monkeypatch.setattr("afm_mlx.training.methods.train.join_ranks", lambda: Ranks(Group(0, 5)))
    pairs = Path(recipe.data).parent / "pairs"
    pairs.mkdir()
    lines(pairs / "train.jsonl", *({"query": f"q {i}", "positive": f"p {i}"} for i in range(8)))
    contrastive = dataclasses.replace(recipe, data=pairs, packing=None, test=False)
    kto = PreferenceTraining(loss=PreferenceLoss("kto"))
    for method, plan, message in (
        (LoRATraining(), recipe, "batch_size is 4, and 5 ranks split each batch"),
        (ContrastiveTraining(), contrastive, "Batches of pairs are not split over ranks"),
        (kto, preferences, "kto's losses depend on the mean over a batch"),
        (
            IFPTraining(stage="chunk", chunk_size=8),
            recipe,
            "Batches of tokens are not split over ranks in this kind",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            train_by(method, plan, pairs.parent / "refused")
    monkeypatch.setattr(ranks_module, "join_ranks", lambda: Ranks(Group(0, 2)))
    for make in (
        lambda path: prune(recipe, path),
        lambda path: predict_mask("afm-nano", path, task="physics"),
    ):
        with pytest.raises(ConfigError, match="needs a single process, and this run has 2 ranks"):
            make(pairs.parent / "refused")


def test_the_system_probes_connections():
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = ranks_module.sockets()
        with socket.create_connection(server.getsockname()) as client:
            ranks_module.probe_connections(ranks_module.sockets() - before)
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

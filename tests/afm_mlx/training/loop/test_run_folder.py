"""Run folders: whole or not there, whatever happens."""

import json
import re
import resource
import sys

import mlx.core as mx
import pytest

from afm_mlx.errors import AFMError, CheckpointError, DataError, TrainingError
from afm_mlx.training.loop.run_folder import RunExistsError, RunFolder, plot_metrics

MANIFEST = {"learning_rate": 1e-4, "keys": ("a", "b"), "data": {"train": "x"}}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", MANIFEST)


def group(value, size=3):
    return {"layers.0.weight": mx.full((size,), value), "half": mx.full((2,), value, mx.bfloat16)}


def save(run, step, **more):
    return run.save(step, {"trainable": group(step), "ema": {}, **more}, {"step": step})


def test_a_checkpoint_comes_back(run):
    path = save(run, 7, optimizer={"step": mx.array(7, mx.uint64)})
    files = {"optimizer.safetensors", "state.json", "trainable.safetensors"}
    assert {file.name for file in path.iterdir()} == files
    tensors, state = run.load(7)
    assert state == {"step": 7}
    assert tensors["optimizer"]["step"].item() == 7
    assert tensors["trainable"]["half"].dtype == mx.bfloat16
    assert mx.array_equal(tensors["trainable"]["layers.0.weight"], mx.full((3,), 7))


def test_the_newest_two_are_kept(run):
    for step in (1, 2, 30, 4000000):
        save(run, step)
    assert run.steps() == [30, 4000000]
    assert len(list((run.path / "checkpoints").iterdir())) == 2


def test_another_manifest_is_refused_by_its_keys_and_the_folder_left_to_others(run):
    run.close()
    other = {"learning_rate": 2e-4, "keys": ("a", "b"), "seed": None}
    for _ in range(2):
        with pytest.raises(TrainingError) as error:
            RunFolder.open(run.path, other)
    for part in ("learning_rate was 0.0001 and is now 0.0002", "data was", "seed was null"):
        assert part in str(error.value)
    assert "keys was" not in str(error.value)
    RunFolder.open(run.path, MANIFEST).close()


@pytest.mark.parametrize("gone", [None, "run.json"])
def test_a_run_is_not_overwritten(run, gone):
    save(run, 3)
    run.close()
    if gone:
        (run.path / gone).unlink()
    for _ in range(2):
        with pytest.raises(RunExistsError, match="holds a training run already"):
            RunFolder.create(run.path, MANIFEST)


def test_a_folder_that_can_not_be_made_or_resumed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"file/run can't be made: .*Choose another path"):
        RunFolder.create(tmp_path / "file" / "run", {})
    with pytest.raises(TrainingError, match="no training run to resume"):
        RunFolder.open(tmp_path / "other", MANIFEST)


def test_one_at_a_time_works_in_a_folder(run):
    for attempt in (RunFolder.open, RunFolder.create):
        with pytest.raises(TrainingError) as error:
            attempt(run.path, MANIFEST)
        assert re.search(r"in use by .*this very process since \d{4}-\d\d-\d\dT", str(error.value))
    run.close()
    with RunFolder.open(run.path, MANIFEST):
        pass
    assert not (run.path / "run.lock").exists()


def test_what_a_killed_process_left_is_removed(run):
    save(run, 3)
    run.close()
    for folder in (run.path, run.path / "checkpoints", run.path / "best"):
        leftover = folder / ".step-0000004-abc.afm-mlx"
        leftover.mkdir(parents=True)
        (leftover / "owner.json").touch()
        (leftover / "trainable.safetensors").touch()
    (run.path / ".gitignore").touch()
    (run.path / "run.lock").write_text("{}")  # without a lock on it
    assert run.steps() == [3]
    with RunFolder.open(run.path, MANIFEST):
        names = {str(path.relative_to(run.path)) for path in run.path.rglob("*")}
    kept = {name for name in names if not name.startswith("checkpoints/step-0000003")}
    assert kept == {".gitignore", "best", "checkpoints", "run.json", "run.lock"}


def test_a_full_disk_leaves_the_old_checkpoint(run):
    save(run, 1)
    run.save_best(group(1), {"step": 1, "valid_loss": 3.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The largest file that may be written: to the process, a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        message = r"step 2 could not be written.*step 1: .*step-0000001"
        with pytest.raises(TrainingError, match=message):
            run.save(2, {"trainable": group(2, 1 << 16)}, {})
        with pytest.raises(TrainingError, match="best weights could not be written"):
            run.save_best(group(2, 1 << 16), {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.steps() == [1]
    assert mx.array_equal(run.load(1).tensors["trainable"]["half"], mx.ones(2))
    assert run.load_best()[1]["step"] == 1
    assert len(list((run.path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("trainable.safetensors", 100, "can't be read"),
        ("state.json", 5, "can't be read"),
        ("state.json", None, "can't be read: No such file"),
        ("state.json", b"[]", "a JSON list"),
    ],
)
def test_damage_is_named(run, name, content, fault):
    path = save(run, 5) / name
    before = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(before[:content] if isinstance(content, int) else content)
    message = f"{name} can't be read: .*There is no checkpoint before it"
    with pytest.raises(CheckpointError, match=message) as error:
        run.load(5)
    assert fault in str(error.value)
    save(run, 1)
    with pytest.raises(CheckpointError, match=r"move .*step-0000005 out of") as error:
        run.load(5)
    assert "goes on from the checkpoint of step 1." in str(error.value)
    assert not re.search("remove|delete", str(error.value))


@pytest.mark.parametrize("metadata", [{}, {"state": "1"}, {"state": '{"step": 1}'}])
def test_best_weights_that_do_not_say_whose_they_are(run, metadata):
    run.save_best(group(1), {"step": 1, "valid_loss": 2.0})
    path = run.path / "best" / "trainable.safetensors"
    mx.save_safetensors(str(path), group(1), metadata)
    with pytest.raises(CheckpointError, match="does not say which step"):
        run.load_best()


def test_the_best_replaces_the_best(run):
    assert run.load_best() is None
    for step in (3, 5):
        run.save_best(group(step), {"step": step, "valid_loss": 1 / step})
        tensors, state = run.load_best()
        assert state == {"step": step, "valid_loss": 1 / step}
        assert state == json.loads((run.path / "best" / "state.json").read_text())
        assert tensors["half"].tolist() == [step, step]


def test_metrics_are_json_whatever_they_are(run):
    run.log({"step": 1, "valid_loss": 800.0, "valid_perplexity": float("inf")})
    run.log({"step": 2, "valid_loss": float("nan")})
    first, second = run.metrics_path.read_text().splitlines()
    assert first == '{"step": 1, "valid_loss": 800.0, "valid_perplexity": null}'
    assert second == '{"step": 2, "valid_loss": null}'
    run.metrics_path.unlink()
    run.metrics_path.mkdir()
    with pytest.raises(TrainingError, match=r"metrics\.jsonl could not be written"):
        run.log({"step": 1})


def test_metrics_are_cut_at_a_step(run):
    for step in (0, 3, 6, 6, 9):
        run.log({"step": step, "loss": 0.1})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 6, "lo')
    run.truncate_metrics(6)
    assert [json.loads(line)["step"] for line in run.metrics_path.open()] == [0, 3, 6, 6]
    run.log({"step": 6, "valid_loss": 0.2})
    run.truncate_metrics(6)
    assert len(metrics := run.metrics_path.read_text().splitlines()) == 5
    run.truncate_metrics(6, evaluated=False)
    assert run.metrics_path.read_text().splitlines() == metrics[:4]
    run.truncate_metrics(-1)
    assert run.metrics_path.read_text() == ""


# -- The picture of a run


def test_a_png_is_written(tmp_path, rng):
    pytest.importorskip("matplotlib")
    import matplotlib.image

    records = [
        {"step": 0, "valid_loss": 3.0, "valid_perplexity": 20.1},
        *({"step": s, "loss": 3 - s / 50, "learning_rate": 1e-3 / s} for s in range(10, 60, 10)),
        {"step": 50, "valid_loss": 2.1, "valid_perplexity": None},
    ]
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    pictures = []
    for count in (2, len(records)):
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records[:count]))
        plot_metrics(metrics, png)
        pictures.append(matplotlib.image.imread(png))
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] != pictures[1]).any()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [None, "", '{"step": 1}\n'])
def test_nothing_to_draw(tmp_path, content):
    pytest.importorskip("matplotlib")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AFMError, match=r"pip install .*\[train\]"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "a.png")

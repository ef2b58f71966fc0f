"""Commands that are ended from outside at any moment: nothing half-written, nothing left by the next run."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.loading.load import load
from afm_mlx.training.loop.run_folder import RunFolder
from tests.tools.cli import ROOT, process
from tests.tools.training_runs import random_adapter

# A disk that takes its time, so that signals come while something is written.
SLOW = """
import os, sys, time
flush = os.fsync
def slow(descriptor):
    time.sleep(float(sys.argv[1]))
    flush(descriptor)
os.fsync = slow
from afm_mlx.cli import main
os._exit(main(sys.argv[2:]))  # at once: while Python takes itself down, nothing handles signals
"""


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


STATUS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
KILLS = [slow(signal.SIGTERM), slow(signal.SIGHUP), signal.SIGKILL]


@dataclass
class Job:
    """A command that writes, to be ended."""

    argv: list
    output: Path
    folders: list  # where it writes
    read: object  # reads the output, and raises when it isn't whole

    def start(self, seconds):
        command = [sys.executable, "-c", SLOW, str(seconds), *map(str, self.argv)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, cwd=ROOT, **pipes)

    def places(self):
        return [place for folder in self.folders for place in folder.glob(".*.afm-mlx")]

    def wait_for_a_place(self, process):
        deadline = time.monotonic() + 60
        while not self.places() and process.poll() is None:
            assert time.monotonic() < deadline, "it wrote nothing"
            time.sleep(0.005)

    def finish(self):
        """Run it to its end."""
        run = next((path for path in (self.output / "run", self.output) if path.is_dir()), None)
        resumes = run is not None and (run / "run.json").exists()
        done = process(*self.argv, *(["--resume"] if resumes else []), timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        self.read(self.output)
        assert self.places() == []


@pytest.fixture
def job(tmp_path, trainable_folder, data, rng):
    def make(name):
        base, work = ["--model", trainable_folder], tmp_path / "work"
        work.mkdir()
        out = work / "out"
        if name == "convert":
            return Job(["convert", *base, "--mlx-path", out, "-q"], out, [work], load)
        if name == "compose":
            adapters = [random_adapter(trainable_folder, tmp_path / n, rng) for n in "ab"]
            weighted = [f"{path}=0.5" for path in adapters]
            argv = ["adapter", "compose", *weighted, *base, "--output", out]
            return Job(argv, out, [work, out], load_adapter)
        if name == "prompt cache":
            out = work / "cache.safetensors"
            argv = ["generate", *base, "--prompt", "say hello", "-m", 2, "--prompt-cache-file", out]
            return Job(argv, out, [work], Path.stat)
        assert name == "lora"
        sizes = "--iters 6 --batch-size 2 --max-seq-length 96 --save-every 1".split()
        run = out / "run"
        folders = [out, run, run / "checkpoints", run / "best"]
        argv = ["lora", *base, "--data", data, "--adapter-path", out, *sizes]
        return Job(argv, out, folders, load_adapter)

    return make


def end_once(job, number, rng):
    """Start the command, end it at a random moment of its writing, and check what is left."""
    started = job.start(0.15)
    job.wait_for_a_place(started)
    time.sleep(rng.uniform(0, 0.5))
    started.send_signal(number)
    _, err = started.communicate(timeout=60)
    if started.returncode == 0:
        return  # it was done
    assert started.returncode == STATUS[number]
    if number != signal.SIGKILL:
        assert err.startswith(f"afm-mlx: stopped by {number.name}")
        assert err.count("\n") == 1
        assert job.places() == []
    elif job.argv[0] == "lora":
        run = RunFolder(job.output / "run")
        for step in run.steps():
            assert run.load(step).tensors


@pytest.mark.parametrize("number", KILLS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", ["convert", *map(slow, ["compose", "prompt cache", "lora"])])
def test_nothing_half_written_is_left(job, rng, name, number):
    job = job(name)
    end_once(job, number, rng)
    last = job.output / "adapter_config.json" if name == "lora" else job.output
    if not last.exists():
        job.finish()
    job.read(job.output)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(job, rng):
    job = job("lora")
    for attempt in range(6):
        if attempt == 1 and (job.output / "run" / "run.json").exists():
            job.argv.append("--resume")
        end_once(job, signal.SIGKILL, rng)
        if (job.output / "adapter_config.json").exists():
            break
    job.argv = [argument for argument in job.argv if argument != "--resume"]
    job.finish()


@pytest.mark.slow
def test_two_resumes_at_once(job):
    job = job("lora")
    first = job.start(0.3)
    while not RunFolder(job.output / "run").steps():
        time.sleep(0.02)
    second = process(*job.argv, "--resume", timeout=60)
    assert second.returncode == 2
    assert f"in use by process {first.pid} since 20" in second.stderr
    first.terminate()
    _, err = first.communicate(timeout=60)
    assert (first.returncode, err.count("\n")) == (143, 1)
    command = err.partition("To go on with it: afm-mlx ")[2].partition(". To start over")[0]
    done = process(*command.split(), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Resumed after step" in done.stdout
    job.read(job.output)

"""Every block of the documents runs, in the order of its page, and prints what is shown behind it.

`PAGES` says for each page what can't run here, and why. README.md and tour.md have commands that take minutes;
they run in `test_readme.py`, with `make test-slow`.
"""

from __future__ import annotations

import re
import shutil
import socket
from importlib.util import find_spec

import numpy as np
import pytest

from afm_mlx.cli import main
from afm_mlx.loading.resolve import resolve_model
from tests.tools.documents import LANGUAGES, ROOT, Reader, page_blocks
from tests.tools.server import running_server
from tests.tools.training_data import write_data

DOCS = ROOT / "docs"
OWN_CHECKPOINT = "a checkpoint that a reader has and we have not"
HOURS = "training takes hours; tour.md runs the same commands for a few steps"
MINUTES = "trains for minutes; tour.md runs the same command for a few steps"
LARGE = "takes minutes: the 3B's shape, or every case of a benchmark"
MEASURES = "takes minutes, and mostly needs programs or data of others"
SERVES = "runs until it is stopped; here a server in a thread takes its place"


def without_coremltools(part: str) -> dict[str, str]:
    """A reason for what needs coremltools, where it is not installed."""
    return {} if find_spec("coremltools") else {part: "needs coremltools"}


def without_coreai_core() -> dict[str, str]:
    """Reasons for what needs coreai-core, where it is not installed."""
    doctor = {"afm-mlx doctor --coreai": "takes minutes; its own tests run it with a tiny model"}
    doctor["mlx-community/"] = "downloads a model; a test converts small ones"
    parts = ("--to coreai", "CoreAIModel(")
    return doctor | ({} if find_spec("coreai") else dict.fromkeys(parts, "needs coreai-core"))


PAGES: dict[str, dict[str, str]] = {
    "adapters.md": {},
    "architecture.md": {},
    "benchmarks.md": {
        "afm-mlx bench": LARGE,
        "make costs": "needs clang, and minutes",
        "python -m bench.": MEASURES,
    },
    "chat.md": {},
    "concepts.md": {},
    "coreai.md": without_coreai_core(),
    "coreml.md": without_coremltools("--to coreml"),
    "dependencies.md": {},
    "doctor.md": {"afm-mlx doctor": "a minute; its own tests run it with small problems"},
    "examples.md": {"astc_study.py": "takes a minute; test_astc_study.py has smaller matrices"},
    "guided.md": {},
    "images.md": {"my-model": "needs a model that sees; test_image_clients.py has a tiny one"},
    "index.md": {"make demo": "installs the package"},
    "kernels.md": {},
    "masks.md": {
        "afm-mlx server": SERVES,
        "--fine-tune-type ifp": HOURS,
        "--model MIXTURE": "needs a mixture of experts; test_prune.py makes a small one",
        "--model second": "the model that the lines before would train",
    },
    "mlx-lm.md": {},
    "models.md": {"path/to/checkpoint": OWN_CHECKPOINT},
    "preferences.md": {},
    "promises.md": {},
    "quantization.md": {
        "--target-bpw": "measures every layer, a minute; tour.md runs it",
        "afm-mlx qat": HOURS,
        "afm-mlx evaluate --model two-bit": "the model that the line before would train",
    },
    "server-model.md": {
        "path/to/checkpoint": OWN_CHECKPOINT,
        "--model my-tracks": "the model that the lines before would make",
    },
    "server.md": {"pip install": "installs the package", "afm-mlx server": SERVES},
    "operations.md": {"afm-mlx server": SERVES},
    "several-machines.md": {
        "mlx.launch": "starts several processes; test_lockstep.py does",
        "join_ranks": "the script of such a process; test_lockstep.py has one",
    },
    "embeddings.md": {},
    "scores.md": {
        "--tasks arc_easy": "fetches data sets",
        "--tasks mmlu": "fetches data sets",
        "afm-mlx server": SERVES,
        "lm_eval --model": "fetches data sets; a test runs lm-eval's clients with local ones",
    },
    "sessions.md": {
        "git clone": "fetches Apple's tests",
        "pip install pytest": "installs packages",
        'python -m afm_mlx.fm "$(': "takes minutes",
    },
    "speculation.md": {"afm-mlx bench": LARGE, "afm-mlx lora": HOURS},
    "troubleshooting.md": {},
    "training.md": {
        "afm-mlx lora": HOURS,
        "afm-mlx qat": HOURS,
        "mlx.launch": "starts several processes; test_ranks.py does",
        "--adapter-path my-adapter --prompt": "the adapter that the line before would train",
        "train_qat(": HOURS,
    },
    "../README.md": {
        "pip": "installs the package",
        "afm-mlx chat": "typed lines; test_readme.py types them, with `make test-slow`",
        "generation_tps": "prints a speed; test_readme.py runs it, with `make test-slow`",
    },
    "../bench/README.md": {
        "pip install": "installs the package, and llama.cpp",
        "python -m bench.": MEASURES,
    },
    "../examples/adapters/README.md": {
        "build.py": HOURS,
        "build_search.py": MINUTES,
        "afm-mlx lora": MINUTES,
        "afm-mlx evaluate": "the data of a reader, and the adapter that the line before would train",
    },
    "../examples/masks/README.md": {"examples/masks/": HOURS},
    "../examples/pt_moe/README.md": {"examples/pt_moe/": HOURS},
    "../examples/nano/README.md": {"pip install": "installs the package", "examples/nano/": HOURS},
    "../examples/vision/README.md": {
        "pip install": "installs the package",
        "examples/vision/": HOURS,
        "--model eyes": "the model that the lines before would train",
    },
}
"""Pages by their paths from docs/, and what of their blocks is parsed or compiled only, and why."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("afm_mlx", "examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("AFM_MLX_MODEL", "AFM_MLX_API_KEY", "AFM_MLX_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_every_page_is_in_the_table():
    pages = ["README.md", "docs/*.md", "bench/*.md", "examples/*/README.md"]
    paths = {path for pattern in pages for path in ROOT.glob(pattern)}
    assert {(DOCS / name).resolve() for name in PAGES} == paths - {
        DOCS / "tour.md"
    }  # test_readme.py
    for path in paths:
        text = path.read_text()
        assert all(block.language in LANGUAGES for block in page_blocks(text)), path
        assert not re.search(r"^(    |\t)(\$ )?(afm-mlx|python|pip|make) ", text, re.M), path


SERVED = ("server.md", "operations.md", "scores.md")


def readable():
    return [name for name in PAGES if name not in SERVED and "```" in (DOCS / name).read_text()]


@pytest.mark.parametrize("page", readable())
def test_the_blocks_of(page, folder, capsys):
    reader = Reader(capsys, PAGES[page])
    reader.read((DOCS / page).read_text())
    assert reader.used == set(PAGES[page]), "a reason for nothing"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_the_blocks_of_the_server_pages(folder, capsys, monkeypatch):
    # lm-eval records the machine's packages, which takes seconds.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    tidy = folder / "my-adapters" / "tidy"
    shutil.copytree(resolve_model("afm-nano") / "adapters" / "redact", tidy)
    with (
        running_server(adapter_folders=(tidy.parent,)) as server,
        running_server(server.served, api_keys=("first-key",)) as guarded,
    ):

        def here(text: str) -> str:
            url = guarded.url if "first-key" in text else server.url
            text = text.replace("http://127.0.0.1:8080", url)
            return (
                text.replace("curl ", "curl --fail -sS ", 1) if text.startswith("curl ") else text
            )

        for page in SERVED:
            reader = Reader(capsys, PAGES[page], here)
            reader.read((DOCS / page).read_text())
            assert reader.used == set(PAGES[page])


QUOTED = """
generate hi --model nope
generate hi --model f.pt
generate hi --model data
generate hi --adapter-path nope
generate hi --model float --adapter-path {todo}
generate hi --model float --draft-model auto
generate hi --max-kv-size 5
generate hi --json-schema s.json -m 3
generate hi --regex (?=a)b
server --host 0.0.0.0
server --port {port}
lora --data nofolder
lora --data data --adapter-path {todo}
"""


def test_the_errors_of_the_troubleshooting_page_are_printed(folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "f.pt").touch()
    (folder / "s.json").write_text('{"type": "string", "minLength": 50}')
    write_data(folder / "data", np.random.default_rng(0))
    assert main(["convert", "--model", "afm-nano", "--mlx-path", "float", "-d"]) == 0
    page = (DOCS / "troubleshooting.md").read_text().replace("`ad holds", "`... holds")
    quoted = [
        re.sub(r"\d+", r"\\d+", re.escape(text).replace(r"\.\.\.", ".*"))
        for text in re.findall("`([^`]+)`", page)
        if len(text) > 30
    ]
    todo = resolve_model("afm-nano") / "adapters" / "todo"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for line in QUOTED.strip().splitlines():
            capsys.readouterr()
            line = line.format(todo=todo, port=taken.getsockname()[1])
            assert main(line.split()) == 2, line
            error = capsys.readouterr().err.removeprefix("afm-mlx: error: ").strip()
            error = error.removeprefix("data/")
            assert any(re.fullmatch(text, error) for text in quoted), error


def test_a_block_that_prints_something_else_is_found(folder, capsys):
    for wrong in (
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```python\nprint(1)\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ afm-mlx info --model nowhere\n```\n",
        "```bash\nls\n```\n",
    ):
        with pytest.raises(AssertionError):
            Reader(capsys, {}).read(wrong)
    Reader(capsys, {"print": "why"}).read("```python\nprint(1)\n```\n")
    with pytest.raises(SyntaxError):
        Reader(capsys, {"print": "why"}).read("```python\nprint(\n```\n")

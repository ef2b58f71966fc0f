"""Other Python clients, over several turns with tools, each in a process with an empty environment."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.afm_mlx.server.clients.programs import DOCUMENTS
from tests.tools.scripted_server import scripted_server
from tests.tools.server import running_server

FOLDER = Path(__file__).parent
PYTHON = Path(
    os.environ.get("AFM_CLIENTS_PYTHON") or Path(sys.prefix) / "clients" / "bin" / "python"
)
"""Python of the environment that `make test-slow` makes from requirements.txt."""

BOTH = [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]
LIMA = [("weather", {"city": "Lima"})]
STEPS = (BOTH, "Rome is warmer.", LIMA, "Lima is warm.")
WRONG_FIRST = ([("Weather", {"city": "Rome"})], [("Weather", {"city": "Lima"})])
ANSWERS = (
    [("final_answer", {"answer": "Rome is warmer."})],
    [("final_answer", {"answer": "Lima is warm."})],
)
CASES = {
    "litellm": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"reasoning_effort"}),
    "autogen": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"messages[].name"}),
    "langchain": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"messages[].name"}),
    "langchain_responses": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"reasoning.effort",
     "reasoning.summary"}),
    "openai_agents": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"verbosity", "store"}),
    "openai_agents_responses": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"text.verbosity",
     "truncation", "reasoning.effort"}),
    "instructor": (WRONG_FIRST, ["Rome", "Lima"], "Lima", set()),
    "smolagents": ((BOTH, ANSWERS[0], LIMA, ANSWERS[1]), ["Rome", "Oslo", "Lima"], "Lima is warm.", set()),
    "llm": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", set()),
    "ollama": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", set()),
    "langchain_ollama": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", {"options.num_ctx"}),
    "litellm_ollama": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", set()),
    "llm_ollama": (STEPS, ["Rome", "Oslo", "Lima"], "Lima is warm.", set()),
}  # fmt: skip
"""For each program: the model's answers, the cities of its tool calls, its last answer, and ignored fields."""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there are no clients at {PYTHON}: make test-slow")
@pytest.mark.parametrize("family", [None, "qwen3"], ids=["afm", "qwen3"])
@pytest.mark.parametrize("name", CASES)
def test_a_client_talks_over_several_turns(name, family, tmp_path, caplog):
    steps, asked, said, ignored = CASES[name]
    with (
        caplog.at_level("INFO", "afm_mlx.server"),
        scripted_server(*steps, family=family, thought="Hm. I wonder.") as (server, script),
    ):
        done = subprocess.run(
            [PYTHON, FOLDER / "programs.py", name, server.url],
            env={"PATH": os.defpath, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "request_errors_total{" not in server.http().get("/metrics").text, done.stderr
    assert done.returncode == 0, done.stderr[-3000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert sorted(reported["asked"]) == sorted(asked)
    assert reported["said"] == said
    named = {
        field
        for record in caplog.records
        if (found := re.search("of no effect here: (.*)", record.message))
        for field in found[1].split(", ")
    }
    honoured = {"reasoning_effort", "reasoning.effort"} if family else set()  # Qwen3 thinks
    assert ignored - honoured <= named, named
    # Results are in the order of the calls, whatever order they were sent in.
    if name not in (
        "instructor",
        "smolagents",
    ):  # these show results to the model as texts of the user
        results = r"(?:<turn_start> tool|<tool_response>)\s(\w+)"
        assert re.findall(results, script.prompts[-1]) == asked


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there are no clients at {PYTHON}: make test-slow")
@pytest.mark.parametrize("name", ["langchain", "llama_index", "langchain_ollama"])
def test_a_client_asks_for_vectors(name, tmp_path):
    with running_server(kv="float") as server:
        done = subprocess.run(
            [PYTHON, FOLDER / "programs.py", f"{name}_embeddings", server.url],
            env={"PATH": os.defpath, "HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = np.array(json.loads(done.stdout.splitlines()[-1])["said"])
        made = server.openai().embeddings.create(model="afm-nano", input=DOCUMENTS, dimensions=32)
    wanted = np.array([item.embedding for item in made.data])
    wanted = np.concatenate([wanted, wanted[:1]])
    assert found.shape == wanted.shape
    assert ((found * wanted).sum(1) > 0.99).all()  # of a packed model, in other batches

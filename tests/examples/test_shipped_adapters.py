"""The adapters that the package carries do their tasks, and the embedded model without them does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import afm_mlx
from afm_mlx.adapters.adapter_folder import TENSORS_NAME, load_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import Example, evaluate, load_examples

EXAMPLES = Path(__file__).parents[2] / "examples"
import inbox  # noqa: E402

ADAPTERS = resolve_model("afm-nano") / "adapters"


def right(examples: list[Example], adapter: Path | None) -> int:
    model, tokenizer = afm_mlx.load("afm-nano", adapter_path=adapter and str(adapter))
    return evaluate(model, tokenizer, examples).overall.correct


def test_a_shipped_adapter_does_its_task_and_the_model_alone_does_not(task, rng):
    drawn = inbox.test_examples(task, int(rng.integers(1 << 30)), 16)
    examples = [Example(each["task"], each["messages"], None, each["answer"], "") for each in drawn]
    assert right(examples[:8], None) == 0
    # Eight or nine of ten are right on average: fewer than seven of sixteen is no bad luck.
    assert right(examples, ADAPTERS / task) >= 7


def test_the_adapters_take_turns_in_one_engine(rng):
    """Chats about the same message, whose turns name different adapters, all in one batch."""
    model, tokenizer = afm_mlx.load("afm-nano")
    pool = AdapterPool(model)
    for task in inbox.TASKS:
        pool.register(task, ADAPTERS / task)
    engine = Engine(model, tokenizer, max_batch=16, adapters=pool)
    expected, answers = {}, {}
    for chat in inbox.switching_examples(int(rng.integers(1 << 30)), 8):
        for turn in chat:
            prompt = tokenizer.apply_chat_template(turn["messages"], add_generation_prompt=True)
            for adapter in (turn["task"], None):
                row = engine.submit(Request(prompt, max_tokens=128, adapter=adapter))
                expected[row], answers[row] = (adapter, turn["answer"]), ""
    for response in engine.run():
        assert response.error is None
        answers[response.row] += response.text
    right = dict.fromkeys([*inbox.TASKS, None], 0)
    for row, (adapter, answer) in expected.items():
        right[adapter] += answers[row].strip() == answer
    assert right.pop(None) == 0
    assert min(right.values()) >= 2, right


def test_a_shipped_adapter_has_its_examples_and_fits_the_embedded_model(task):
    folder = ADAPTERS / task
    model, _ = afm_mlx.load("afm-nano")
    tensors, config = load_adapter(folder)
    assert config.base_model_fingerprint == base_model_fingerprint(model)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"mlx.core.float16"}
    assert (folder / TENSORS_NAME).stat().st_size < 1_000_000
    examples = load_examples(folder / "evaluation.jsonl")
    assert {example.task for example in examples} == {task}
    for example in examples:
        ask, _ = inbox.TASKS[task]
        assert example.messages[-1]["content"].startswith(f"{ask}\n")
    assert (folder / "README.md").is_file()


def test_the_chat_in_the_readme_is_what_the_program_says():
    readme = (EXAMPLES.parent / "README.md").read_text()
    (chat,) = [block for block in readme.split("```")[1::2] if "$ afm-mlx chat\n" in block]
    lines = chat.split("$ afm-mlx chat\n")[1].splitlines()
    typed = [line.removeprefix(">> ") for line in lines if line.startswith(">> ")]
    wanted = [line for line in lines if not line.startswith(">> ")]
    command = [sys.executable, "-m", "afm_mlx", "chat"]
    done = subprocess.run(
        command, input="\n".join(typed), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == wanted

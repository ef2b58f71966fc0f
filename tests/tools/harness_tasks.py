"""Tasks for lm-eval without a network: YAML files, and lines made of the embedded model's own tasks."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

from afm_mlx.loading.resolve import resolve_model

CHOICES = 4


def embedded_questions(count: int) -> list[dict[str, object]]:
    """Questions of the embedded model's tasks, each with four answers: its own and three of other questions."""
    lines = (resolve_model("afm-nano") / "evaluation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    answers = defaultdict(set)
    for record in records:
        answers[record["task"]].add(record["answer"])
    draw = random.Random(0)
    draw.shuffle(records)
    made = []
    for record in records:
        others = sorted(answers[record["task"]] - {record["answer"]})
        if len(others) >= CHOICES - 1 and len(made) < count:
            gold = draw.randrange(CHOICES)
            choices = draw.sample(others, CHOICES - 1)
            choices.insert(gold, record["answer"])
            question = record["messages"][-1]["content"]
            made.append({"question": question, "choices": choices, "gold": gold})
    assert len(made) == count
    return made


def write_task(folder: Path, name: str, records: list[dict[str, object]], yaml: str) -> None:
    """Write a task and its data, of which the first two lines are the examples of few-shot prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    files = {"test": str(data), "train": str(data)}
    head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {json.dumps(files)}\n"
    splits = "test_split: test\nfewshot_split: train\nfewshot_config:\n  sampler: first_n\n"
    (folder / f"{name}.yaml").write_text(f"{head}{splits}{yaml}")


def write_choices(folder: Path, count: int, name: str = "nano_choices") -> str:
    """Write a task of multiple choice, and return its name."""
    yaml = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
    write_task(folder, name, embedded_questions(count), yaml)
    return name


def write_answers(folder: Path, count: int, name: str = "nano_answers") -> str:
    """Write a task of free answers, of which only the first word counts, and return its name."""
    records = [
        {"question": each["question"], "answer": str(each["choices"][each["gold"]]).split()[0]}
        for each in embedded_questions(count)
    ]
    yaml = r"""output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\n", "<turn_end>"]
  max_gen_toks: 16
  do_sample: false
filter_list:
  - name: first-word
    filter:
      - function: regex
        regex_pattern: "(\\S+)"
      - function: take_first
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
    write_task(folder, name, records, yaml)
    return name

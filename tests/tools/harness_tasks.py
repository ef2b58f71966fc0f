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


def write_texts(folder: Path, count: int, name: str = "nano_texts") -> str:
    """Write a task of texts whose perplexity counts, and return its name."""
    records = [{"text": each["question"]} for each in embedded_questions(count)]
    yaml = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
    write_task(folder, name, records, yaml)
    return name


INSTRUCTIONS = [
    ("keywords:existence", {"keywords": ["fox", "dog"]}, "The fox and the dog.", "The cat."),
    (
        "keywords:frequency",
        {"keyword": "fox", "frequency": 2, "relation": "at least"},
        "A fox, a fox.",
        "A fox.",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["fox"]}, "A dog.", "A fox."),
    (
        "keywords:letter_frequency",
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "Pizza.",
        "Bread.",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein ganz einfacher deutscher Satz über das Wetter.",
        "This is a very simple English sentence about the weather.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "One. Two. Three.",
        "One. Two.",
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "One.\n\n***\n\nTwo.",
        "One.\n\nTwo.",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "Two words.",
        "These are four words.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "fox"},
        "One.\n\nFox it is.",
        "One.\n\nDog it is.",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "Dear [name], [date].",
        "Dear [name].",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Well.\n\nP.S. Bye.",
        "Well. Bye.",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n* two", "* one"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Surely."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and *two*",
        "*one* and two",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nOne.\nSection 2\nTwo.",
        "One. Two.",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a is 1"),
    ("detectable_format:title", {}, "<<The fox>>\nIt runs.", "The fox\nIt runs."),
    ("combination:two_responses", {}, "Yes.\n******\nNo.", "Yes. No."),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write on foxes."},
        "Write on foxes. They run.",
        "They run.",
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, "It runs. The end.", "It runs."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG RED fox.",
        "The big fox.",
    ),
    (
        "change_case:english_capital",
        {},
        "THIS IS A SIMPLE ENGLISH SENTENCE ABOUT THE WEATHER.",
        "This is a simple English sentence about the weather.",
    ),
    (
        "change_case:english_lowercase",
        {},
        "this is a simple english sentence about the weather.",
        "This is a simple English sentence about the weather.",
    ),
    ("punctuation:no_comma", {}, "A fox and a dog.", "A fox, a dog."),
    ("startend:quotation", {}, '"It runs."', "It runs."),
]
"""IFEval's instructions, with arguments, an answer that follows them, and one that doesn't."""


def write_ifeval(folder: Path, name: str = "canned_ifeval") -> dict[str, str]:
    """Write IFEval with other prompts, two for each instruction; return the answers to them.

    The first of two answers follows the instruction. NLTK's sentence splitter, which lm-eval would download,
    is put into `folder/nltk_data` without abbreviations.
    """
    import lm_eval.tasks

    splitter = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    splitter.mkdir(parents=True)
    for part in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (splitter / part).touch()
    records, answers = [], {}
    for instruction, arguments, right, wrong in INSTRUCTIONS:
        for i, answer in enumerate((right, wrong)):
            prompt = f"{len(records)}. Write on foxes."
            answers[prompt] = answer
            records.append(
                {
                    "key": len(records),
                    "prompt": prompt,
                    "instruction_id_list": [instruction],
                    "kwargs": [arguments],
                    "is_right": i == 0,
                }
            )
    original = Path(lm_eval.tasks.__file__).parent / "ifeval" / "ifeval.yaml"
    write_task(folder, name, records, f"include: {original}\ndataset_name: null\n")
    return answers

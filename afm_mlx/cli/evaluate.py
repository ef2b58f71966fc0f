"""Measure how well models do: in tasks of lm-evaluation-harness (`--tasks`), or in how many examples of a test
set they solve, with and without constraints. `--compare` puts several models side by side; `--pairwise` lets a
judge compare two files of answers; `--reward` scores answers, or measures a reward model on pairs of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import (
    FLAG,
    MAX_ROWS,
    SWITCH,
    Argument,
    UsageError,
    flag_of,
    integer,
    json_object,
)
from afm_mlx.cli.output import note, print_json, print_table, progress_bar
from afm_mlx.cli.perplexity import HELD_OUT
from afm_mlx.cli.signals import Terminated
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.measure.judge_tools import TOOLS, find_tools

if TYPE_CHECKING:
    from afm_mlx.measure.comparison import Score, Scores
    from afm_mlx.measure.evaluation import Evaluation, TaskScore
    from afm_mlx.measure.perplexity import Perplexity
    from afm_mlx.measure.reward_model import RewardModel
    from afm_mlx.ranks import Ranks

TEST_SET = "evaluation.jsonl"
MAX_TOKENS = 1 << 20
"""Most tokens of a prompt with its answer that are read; the model's context is checked later."""

_CONSTRAINED = {"never": [False], "always": [True], "both": [False, True]}

# fmt: off
_EXAMPLES = [
    Argument("--constrained", ["never", "always", "both"],
             "constrain answers to the schema of the example's response format, or calls to calls of its "
             "tools; both measures with and without", "never"),
    Argument("--show-errors", integer(0), "print N wrong answers", 0, metavar="N"),
]
_TASKS = [
    Argument("--include-path", None, "folder of further tasks: YAML files as lm-eval has them",
             metavar="FOLDER"),
    Argument("--output-dir", None,
             "folder of results as lm-eval writes them, and of the answers so far, from which the same "
             "command continues after an interrupt", ".", metavar="FOLDER"),
    Argument("--num-shots", integer(0), "examples in each prompt; by default the task's own number",
             metavar="N"),
    Argument("--max-tokens", integer(1),
             "maximum tokens of an answer; by default the task's own number, or 256"),
    Argument("--apply-chat-template", SWITCH,
             "write prompts as chats; the default if the model has a chat template"),
    Argument("--chat-template-args", json_object,
             "variables for the chat template, such as '{\"enable_thinking\": false}'", {}, metavar="JSON"),
    Argument("--fewshot-as-multiturn", FLAG, "write each example in a prompt as a turn of the chat"),
    Argument("--confirm-run-unsafe-code", FLAG, "allow tasks that run code which the model writes"),
    Argument("--log-samples", FLAG, "write each question and answer to the results, too"),
    Argument("--seed", integer(0, 2**32 - 1), "seed of the choice of examples, and of sampled answers", 123),
]
_PAIRWISE = [
    Argument("--judge", None, "model that says which answer is better: a folder or hub id", metavar="MODEL"),
    Argument("--judge-adapter", None, "the judge's adapter", metavar="FOLDER"),
    Argument("--tools", None,
             f"checks whose reports the judge has: {', '.join(TOOLS)}. It says for each answer which of "
             "them are useful; none by default",
             nargs="+", metavar="TOOL"),
    Argument("--reasons", integer(0),
             "most characters of the reasons that the judge gives before each verdict", 0, metavar="N"),
]
ARGUMENTS = {
    "options": [
        Argument("--model", None, f"model folder or hub id; {EMBEDDED_MODEL} by default"),
        *(row for row in model_options.LOADING if row is not model_options.MODEL),
        Argument("--compare", None,
                 "models to compare with the first of them: folders or hub ids, or MODEL:ADAPTER for a model "
                 "with an adapter",
                 nargs="+", metavar="MODEL"),
        Argument("--data", None,
                 'lines of {"task", "messages", "tools"?, "answer", "compare"?}; by default the model '
                 f"folder's {TEST_SET}, which the embedded model has",
                 metavar="FILE.jsonl"),
        Argument("--limit", integer(1), "examples per task, or lines; all by default"),
        Argument("--batch-size", integer(1, MAX_ROWS), "rows that run at the same time", 16),
        model_options.JSON,
    ],
    "examples of a file": _EXAMPLES,
    "tasks of lm-evaluation-harness": [
        Argument("--tasks", None, "tasks, groups or tags, such as arc_easy,hellaswag,mmlu,gsm8k,ifeval",
                 nargs="+"),
        *_TASKS,
    ],
    "two files of answers": [
        Argument("--pairwise", None,
                 'compare A with B: lines of {"prompt" or "messages", "answer", "id"?, "schema"?}, matched by '
                 "id, or else by prompt. A judge sees a pair in both orders; if they disagree, it is a tie",
                 nargs=2, metavar=("A.jsonl", "B.jsonl")),
        *_PAIRWISE,
    ],
    "a reward model": [
        Argument("--reward", None,
                 "reward adapter, which runs on --model: its accuracy on pairs of --data, lines of "
                 '{"prompt" or "messages", "chosen", "rejected", "strength"?, "grades"?}, or the rewards of '
                 'answers, {"prompt" or "messages", "answer"}',
                 metavar="FOLDER"),
    ],
}
# fmt: on
ALTERNATIVES = (("model", "compare", "which models run"), ("tasks", "data", "what they answer"))
_SOURCES = (
    ("is for the examples of a file", None, _EXAMPLES),
    ("needs --tasks", "tasks", _TASKS),
    ("needs --pairwise", "pairwise", _PAIRWISE),
)
"""What the arguments are for, the argument that chooses it, and the others that it has."""


class _Choice(NamedTuple):
    """A model that the arguments name, and its adapter."""

    name: str
    model: str
    adapter: str | None


def run(args: argparse.Namespace) -> None:
    source = next((name for name in ("reward", "pairwise", "tasks") if getattr(args, name)), None)
    for need, name, rows in _SOURCES:
        for row in rows if name != source else ():
            if getattr(args, row.name) != row.options["default"]:
                raise UsageError(f"{flag_of(row.name)} {need}; leave it out.")
    from afm_mlx.ranks import join_ranks, refuse_ranks

    if source in ("reward", "pairwise"):
        refuse_ranks(flag_of(source))
        (_run_reward if args.reward else _run_pairwise)(args)
        return
    choices, ranks = _choices(args), join_ranks()
    if args.tasks:
        _run_tasks(args, choices, ranks)
    elif args.compare:
        _compare_examples(args, choices, ranks)
    else:
        _run_examples(args, choices[0], ranks)


def _choices(args: argparse.Namespace) -> list[_Choice]:
    """Return the models that the arguments name, with their adapters."""
    if not args.compare:
        model = args.model or EMBEDDED_MODEL
        adapter = model_options.adapter_name(args)
        name = model if adapter is None else f"{model}:{adapter}"
        return [_Choice(name, model, args.adapter_path)]
    for flag in ("adapter_path", "mask"):
        if getattr(args, flag) is not None:
            raise UsageError(
                f"{flag_of(flag)} is for one model; write MODEL:ADAPTER after --compare, where ADAPTER may be "
                "a folder with a task mask."
            )
    if len(args.compare) < 2:
        raise UsageError(f"--compare has one model, {args.compare[0]}; two or more are needed.")
    found = []
    for text in args.compare:
        model, _, adapter = (
            (text, "", "") if Path(text).expanduser().is_dir() else text.partition(":")
        )
        found.append(_Choice(text, model, adapter or None))
    return found


def _loading(args: argparse.Namespace, choice: _Choice) -> dict[str, Any]:
    """Return the options of `load` for a model."""
    return {
        "adapter_path": choice.adapter,
        "trust_remote_code": args.trust_remote_code,
        "activation_bits": args.activation_bits,
        "force_adapter": args.force,
        "mask": args.mask,
    }


# -- tasks of lm-evaluation-harness


def _run_tasks(args: argparse.Namespace, choices: Sequence[_Choice], ranks: Ranks) -> None:
    from lm_eval.utils import make_table

    from afm_mlx.measure.harness_model import HarnessModel
    from afm_mlx.measure.harness_tasks import find_tasks, question_scores, run_tasks

    names = [name for text in args.tasks for name in text.split(",") if name]
    include = None if args.include_path is None else Path(args.include_path).expanduser()
    folder = Path(args.output_dir).expanduser()
    tasks = find_tasks(names, include)
    found: dict[str, Any] = {}
    scores, kept = [], []
    for choice in choices:
        model = HarnessModel(
            choice.model,
            args.batch_size,
            args.max_tokens,
            args.chat_template_args,
            args.seed,
            partial(progress_bar, is_shown=ranks.is_first),
            ranks,
            **_loading(args, choice),
        )
        model_options.check_ranks(args, ranks, model.model, names)
        is_chat = args.apply_chat_template
        kept.append(model.keep_answers(folder))
        _report_answers(choice.name, kept, model.answer_count)
        try:
            results, file = run_tasks(
                model,
                choice.name,
                tasks,
                names,
                folder,
                log_samples=args.log_samples,
                seed=args.seed,
                num_fewshot=args.num_shots,
                limit=args.limit,
                apply_chat_template=model.tokenizer.has_chat_template
                if is_chat is None
                else is_chat,
                fewshot_as_multiturn=args.fewshot_as_multiturn,
                confirm_run_unsafe_code=args.confirm_run_unsafe_code,
            )
        except (KeyboardInterrupt, Terminated) as stopped:
            stopped.add_note(f"The answers so far are in {folder}: the same command continues.")
            raise
        scores.append(question_scores(results))
        found[choice.name] = {"results": results["results"], "file": str(file)}
        if ranks.is_first and not args.json:
            print(f"Model: {choice.name}\nResults: {file}")
            for column in ("results", "groups"):
                if column in results:
                    print(make_table(results, column))
        del model, results
        gc.collect()  # before the next model comes
    for path in kept:
        path.unlink(missing_ok=True)
    if not ranks.is_first:
        return
    if args.json:
        print_json(
            {
                "models": found,
                **({"differences": _differences(choices, scores)} if args.compare else {}),
            }
        )
    elif args.compare:
        _print_comparison(choices, scores)


def _report_answers(name: str, kept: Sequence[Path], count: int) -> None:
    """Report answers of earlier runs: `count` are in the last file of `kept`, others in files next to it."""
    if count:
        note(f"{name}: {kept[-1]} has {count} answers of a run that was interrupted; it continues.")
    elif others := sorted({*kept[-1].parent.glob("answers-*.jsonl")} - {*kept}):
        names = ", ".join(map(str, others))
        note(
            f"{name}: starts from the first request; {names} is of another model or other options."
        )


# -- comparison


def _differences(choices: Sequence[_Choice], scores: Sequence[Scores]) -> list[dict[str, Any]]:
    from afm_mlx.measure.comparison import difference

    return [
        {"task": task, "metric": metric, "model": choice.name, "of": choices[0].name}
        | dataclasses.asdict(difference(first, other[task, metric]))
        for (task, metric), first in scores[0].items()
        for choice, other in zip(choices[1:], scores[1:], strict=True)
    ]


def _print_comparison(choices: Sequence[_Choice], scores: Sequence[Scores]) -> None:
    """Print a row for each task and metric: each model's score, and its difference from the first one's."""
    from afm_mlx.measure.comparison import difference

    letters = [f"{chr(ord('A') + i)}" if i < 26 else str(i + 1) for i in range(len(choices))]
    for letter, choice in zip(letters, choices, strict=True):
        print(f"{letter}: {choice.name}")
    titles = ["task", "metric", "questions", letters[0]]
    titles += [title for letter in letters[1:] for title in (letter, f"{letter} - {letters[0]}")]
    rows: list[Sequence[Any]] = [titles]
    for (task, metric), first in scores[0].items():
        cells = [task, metric, _count(first), f"{first.value:.4f}"]
        for other in scores[1:]:
            score = other[task, metric]
            found = difference(first, score)
            margin = "" if found.margin is None else f" ± {found.margin:.4f}"
            cells += [f"{score.value:.4f}", f"{found.value:+.4f}{margin}"]
        rows.append(cells)
    print_table(rows)
    print("± is half of the 95 % interval of the difference, paired by question.")


def _count(score: Score) -> Any:
    return "-" if score.questions is None else len(score.questions)


# -- two files of answers


def _run_pairwise(args: argparse.Namespace) -> None:
    from afm_mlx.loading.load import load
    from afm_mlx.measure.pairwise import ModelJudge, judge_pairs, load_answer_pairs

    for name in ("model", "compare", "adapter_path", "mask", "tasks", "data"):
        if getattr(args, name):
            raise UsageError(f"{flag_of(name)} is of no use with --pairwise, which has --judge.")
    if args.judge is None:
        raise UsageError("--judge is missing: the model that compares the answers.")
    tools = find_tools([name for text in args.tools or () for name in text.split(",") if name])
    a, b = args.pairwise
    pairs, unmatched = load_answer_pairs(a, b, args.limit)
    choice = _Choice(args.judge, args.judge, args.judge_adapter)
    model, tokenizer = load(choice.model, **_loading(args, choice))
    judge = ModelJudge(model, tokenizer, args.batch_size)
    with progress_bar("judging", "question") as progress:
        found = judge_pairs(
            judge, pairs, tools, reasons=args.reasons, unmatched=unmatched, progress=progress
        )
    counts = {name: found.count(name) for name in ("a", "b", "tie")}
    low, high = found.interval
    if args.json:
        verdicts = [
            {"a": v.pair.a.where, "b": v.pair.b.where, "winner": v.winner}
            | {"preferred": v.preferred, "reports": v.reports}
            for v in found.verdicts
        ]
        names = {"a": a, "b": b, "judge": args.judge, "judge_adapter": args.judge_adapter}
        facts = {"pairs": len(pairs), "wins": counts, "win_rate": found.win_rate}
        facts |= {"interval": found.interval, "first_rate": found.first_rate}
        print_json(names | facts | {"unmatched": unmatched, "verdicts": verdicts})
        return
    print(f"A: {a}\nB: {b}\nJudge: {args.judge}")
    print_table([("pairs", "A wins", "B wins", "ties"), (len(pairs), *counts.values())])
    print(
        f"A's win rate, with half of the ties: {found.win_rate:.1%} (95 %: {low:.1%} to {high:.1%}). "
        f"The answer that was shown first was preferred in {found.first_rate:.1%} of the verdicts."
    )
    if any(unmatched):
        print(f"Answers without a counterpart: {unmatched[0]} of A, {unmatched[1]} of B.")


# -- a reward model


def _run_reward(args: argparse.Namespace) -> None:
    from afm_mlx.jsonl import read_jsonl
    from afm_mlx.measure.reward_model import RewardModel

    for name in ("compare", "adapter_path", "mask", "tasks", "pairwise"):
        if getattr(args, name):
            raise UsageError(f"{flag_of(name)} is of no use with --reward; leave it out.")
    if args.data is None:
        raise UsageError("--data is missing: the pairs or answers that --reward scores.")
    data = Path(args.data).expanduser()
    first = next(iter(read_jsonl(data)), ("", None))[1]
    has_pairs = isinstance(first, dict) and "chosen" in first
    choice = _Choice(args.reward, args.model or EMBEDDED_MODEL, None)
    loading = _loading(args, choice)
    del loading["adapter_path"], loading["mask"]
    model = RewardModel.load(choice.model, args.reward, batch_size=args.batch_size, **loading)
    measured = (_score_pairs if has_pairs else _score_answers)(args, data, model)
    facts = {"model": choice.model, "reward": args.reward, "data": str(data)}
    if args.json:
        print_json(facts | measured)
        return
    print(f"Model: {choice.model}\nReward: {args.reward}")
    if not has_pairs:
        print(f"Data: {data} ({len(measured['rewards'])} answers)")
        print(
            f"Mean reward: {measured['mean']:.3f}, from {measured['min']:.3f} to {measured['max']:.3f}"
        )
        return
    low, high = measured["interval"]
    print(f"Data: {data} ({measured['pairs']} pairs)")
    rows: list[Sequence[Any]] = [("strength", "pairs", "accuracy", "mean margin")]
    for name, each in measured["strengths"].items():
        rows.append((name, each["pairs"], f"{each['accuracy']:.1%}", f"{each['margin']:.3f}"))
    print_table(rows)
    print(f"Accuracy: {measured['accuracy']:.1%} (95 %: {low:.1%} to {high:.1%})")
    for axis, each in measured["grades"].items():
        print(
            f"Grades of {axis.replace('_', ' ')}: {each['accuracy']:.1%} of {each['answers']} right"
        )


def _score_answers(args: argparse.Namespace, data: Path, model: RewardModel) -> dict[str, Any]:
    """Return the rewards of a file's answers, in its order, as JSON values."""
    from afm_mlx.measure.pairwise import load_answers
    from afm_mlx.measure.rewards import Answered

    answers = list(load_answers(data, unique=False).values())[: args.limit]
    asked = [
        Answered("", each.text, {"messages": each.messages, "tools": each.tools}, each.where)
        for each in answers
    ]
    with progress_bar("scoring", "answer") as progress:
        rewards = list(model.of_all(asked, progress))
    facts = {"mean": sum(rewards) / len(rewards), "min": min(rewards), "max": max(rewards)}
    return facts | {"rewards": rewards}


def _score_pairs(args: argparse.Namespace, data: Path, model: RewardModel) -> dict[str, Any]:
    """Return how often a file's chosen answers have the larger rewards, and right grades, as JSON values."""
    import numpy as np

    from afm_mlx.adapters.adapter_folder import GRADED_AXES
    from afm_mlx.adapters.reward_head import NO_GRADE
    from afm_mlx.measure.comparison import wilson_interval
    from afm_mlx.training.data.preferences import STRENGTHS, load_preferences
    from afm_mlx.training.data.reward_pairs import grades_of

    pairs = load_preferences(data, "test", model.tokenizer, MAX_TOKENS)[: args.limit]
    sides = [[p.chosen for p in pairs], [p.rejected for p in pairs]]
    chats = [
        [*p.prompt.tolist(), *answer.tolist()]
        for side in sides
        for p, answer in zip(pairs, side, strict=True)
    ]
    grades = np.array([grades_of(p.grades, p.where) for p in pairs])
    with progress_bar("scoring", "answer") as progress:
        scores = model.scores(chats, [p.where for p in pairs] * 2, progress)
    margins = scores.rewards[: len(pairs)] - scores.rewards[len(pairs) :]
    names = {value: name for name, value in STRENGTHS.items()}
    labels = [
        "not given" if p.strength is None else names.get(p.strength, str(p.strength)) for p in pairs
    ]
    strengths = {}
    for label in dict.fromkeys(labels):
        own = margins[[each == label for each in labels]]
        share = float((own > 0).mean())
        strengths[label] = {"pairs": len(own), "accuracy": share, "margin": float(own.mean())}
    graded = {}
    for axis, probabilities in scores.grades.items():
        given = grades[:, :, GRADED_AXES.index(axis)].T.reshape(-1)
        is_graded = given != NO_GRADE
        if is_graded.any():
            is_right = (probabilities.argmax(axis=1) == given)[is_graded]
            graded[axis] = {"answers": len(is_right), "accuracy": float(is_right.mean())}
    accuracy = float((margins > 0).mean())
    return {
        "pairs": len(pairs),
        "accuracy": accuracy,
        "interval": wilson_interval(accuracy, len(pairs)),
        "margin": float(margins.mean()),
        "strengths": strengths,
        "grades": graded,
        "margins": margins.tolist(),
    }


# -- examples of a file


def _test_set(args: argparse.Namespace, choice: _Choice) -> Path:
    from afm_mlx.loading.resolve import resolve_model

    data = Path(args.data) if args.data is not None else resolve_model(choice.model) / TEST_SET
    if args.data is None and not data.is_file():
        raise UsageError(f"--data is missing, and {choice.model} has no {TEST_SET}.")
    return data


def _evaluated(
    args: argparse.Namespace, model: Any, tokenizer: Any, examples: Any, ranks: Ranks
) -> dict[bool, Evaluation]:
    from afm_mlx.measure.evaluation import evaluate

    model_options.check_ranks(args, ranks, model, [dataclasses.astuple(e) for e in examples])
    found = {}
    for constrained in _CONSTRAINED[args.constrained]:
        with progress_bar("answering", "example", ranks.is_first) as progress:
            options: dict[str, Any] = {"batch_size": args.batch_size, "ranks": ranks}
            options["constrained"] = constrained
            found[constrained] = evaluate(model, tokenizer, examples, progress=progress, **options)
    return found


def _compare_examples(args: argparse.Namespace, choices: Sequence[_Choice], ranks: Ranks) -> None:
    from afm_mlx.loading.load import load
    from afm_mlx.measure.evaluation import load_examples, question_scores

    if args.show_errors:
        raise UsageError("--show-errors is for one model; leave out --compare, or it.")
    examples = load_examples(_test_set(args, choices[0]), args.limit)
    scores = []
    for choice in choices:
        model, tokenizer = load(choice.model, **_loading(args, choice))
        evaluations = _evaluated(args, model, tokenizer, examples, ranks)
        scores.append(
            {
                (task, "constrained" if constrained else "accuracy"): score
                for constrained, evaluation in evaluations.items()
                for task, score in question_scores(evaluation).items()
            }
        )
        del model, tokenizer
        gc.collect()
    if not ranks.is_first:
        return
    if args.json:
        values = [{f"{t},{m}": score.value for (t, m), score in found.items()} for found in scores]
        names = [choice.name for choice in choices]
        differences = _differences(choices, scores)
        print_json({"models": dict(zip(names, values, strict=True)), "differences": differences})
    else:
        _print_comparison(choices, scores)


def _run_examples(args: argparse.Namespace, choice: _Choice, ranks: Ranks) -> None:
    from afm_mlx.loading.load import load
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure.evaluation import load_examples
    from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity

    folder, data = resolve_model(choice.model), _test_set(args, choice)
    examples = load_examples(data, args.limit)
    model, tokenizer = load(choice.model, **_loading(args, choice))
    evaluations = _evaluated(args, model, tokenizer, examples, ranks)
    perplexity = None
    if (folder / HELD_OUT).is_file():
        pieces = cut(load_documents(folder / HELD_OUT, tokenizer))
        with progress_bar("perplexity", "sample", ranks.is_first) as progress:
            perplexity = measure_perplexity(
                model, tokenizer, pieces, args.batch_size, progress, ranks
            )
    if not ranks.is_first:
        return
    args.model = choice.model
    if args.json:
        print_json(_as_json(args, data, evaluations, perplexity))
    else:
        _print(args, data, evaluations, perplexity)


def _as_json(
    args: argparse.Namespace,
    data: Path,
    evaluations: dict[bool, Evaluation],
    perplexity: Perplexity | None,
) -> dict[str, Any]:
    def score(score: TaskScore) -> dict[str, Any]:
        return dataclasses.asdict(score) | {"accuracy": score.accuracy}

    scores = []
    for evaluation in evaluations.values():
        wrong = [(m.example, m.answer) for m in evaluation.mistakes[: args.show_errors]]
        errors = [
            {"where": e.where, "task": e.task, "expected": e.answer, "got": answer}
            for e, answer in wrong
        ]
        scores.append(
            {
                "tasks": {task: score(result) for task, result in evaluation.tasks.items()},
                "overall": score(evaluation.overall),
                "seconds": evaluation.seconds,
                "errors": errors,
            }
        )
    names = ("perplexity", "standard_error", "tokens")
    return {
        "model": args.model,
        "data": str(data),
        "constrained": next(iter(evaluations)),
        **scores[0],
        **({"under_constraints": scores[1]} if len(scores) == 2 else {}),
        "perplexity": perplexity and {name: getattr(perplexity, name) for name in names},
    }


def _print(
    args: argparse.Namespace,
    data: Path,
    evaluations: dict[bool, Evaluation],
    perplexity: Perplexity | None,
) -> None:
    for constrained, evaluation in evaluations.items():
        for mistake in evaluation.mistakes[: args.show_errors]:
            under = ", constrained" if constrained else ""
            print(f"{mistake.example.where} ({mistake.example.task}{under})")
            print(f"  expected: {mistake.example.answer!r}")
            print(f"  got:      {mistake.answer!r}")
    print(f"Model: {args.model}")
    seconds = " and ".join(f"{evaluation.seconds:.1f}" for evaluation in evaluations.values())
    count = len(next(iter(evaluations.values())).answers)
    print(f"Data: {data} ({count} examples in {seconds} seconds)")
    print_table(_table(evaluations))
    if perplexity is not None:
        print(
            f"Perplexity: {perplexity.perplexity:.3f} ± {perplexity.standard_error:.3f} "
            f"({perplexity.tokens} tokens of {HELD_OUT})"
        )


def _table(evaluations: dict[bool, Evaluation]) -> list[tuple[Any, ...]]:
    """Return a row for each task; if both are measured, the last two columns are with constraints."""
    first, *others = (
        {**evaluation.tasks, "all": evaluation.overall} for evaluation in evaluations.values()
    )
    titles = ["task", "correct", "of", "accuracy", *["constrained", "accuracy"] * len(others)]
    rows: list[tuple[Any, ...]] = [tuple(titles)]
    for task, score in first.items():
        constrained = [x for o in others for x in (o[task].correct, f"{o[task].accuracy:.1%}")]
        rows.append((task, score.correct, score.total, f"{score.accuracy:.1%}", *constrained))
    return rows

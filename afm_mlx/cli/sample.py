"""Sample answers to many prompts from several adapters at a time, rank them by rewards, and write preference
pairs or winners, for `afm-mlx lora` to train on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, astuple
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import MAX_ROWS, Argument, UsageError, flag_of, integer
from afm_mlx.cli.generate import CONSTRAINT, answer_constraint
from afm_mlx.cli.output import note, print_json, print_table, progress_bar
from afm_mlx.cli.signals import Terminated
from afm_mlx.files import atomic_write, refuse_existing

if TYPE_CHECKING:
    import mlx.nn as nn

    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.guidance.call_forms import CallForm
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.jsonl import AppendedLines
    from afm_mlx.measure.committee import Candidate, Ranked
    from afm_mlx.measure.rewards import Rewards
    from afm_mlx.ranks import Ranks
    from afm_mlx.tokenizer.protocol import Tokenizer

_OUTPUTS = ("pairs_to", "winners_to", "answers_to")

# fmt: off
_SAMPLED = [
    Argument("--committee", None, "adapters that answer: paths, or names of ones that come with the model; "
                                  "base for the model alone", ["base"], nargs="+", metavar="ADAPTER"),
    Argument("--samples", integer(1, MAX_ROWS), "answers of each adapter to each prompt", 4),
    Argument("--max-tokens -m", integer(1), "maximum tokens of an answer", 256),
    Argument("--batch-size", integer(1, MAX_ROWS), "rows that run at the same time", 32),
]
ARGUMENTS = {
    "options": [
        *(row for row in model_options.LOADING if row.name not in ("adapter_path", "mask")),
        Argument("--data", None,
                 'prompts: lines of {"prompt" or "messages", ...} with any keys that rewards look at',
                 metavar="FILE.jsonl"),
        Argument("--pairs-from", None,
                 'in place of --data: prompts with answers that exist already, "answers": [TEXT, ...] in each '
                 "line", metavar="FILE.jsonl"),
        Argument("--limit", integer(1), "number of first prompts; all by default"),
        *_SAMPLED,
        model_options.JSON,
    ],
    "what makes an answer good": [*model_options.REWARDS, model_options.VERIFY],
    "files to write": [
        Argument("--pairs-to", None, "the best and the worst answer to each prompt, as TRL has it",
                 metavar="FILE.jsonl"),
        Argument("--winners-to", None, "the best answer to each prompt, as a chat or completion",
                 metavar="FILE.jsonl"),
        Argument("--answers-to", None, "all answers with their rewards", metavar="FILE.jsonl"),
    ],
    "what answers must look like, at most one of the first four": CONSTRAINT,
    "sampling": model_options.sampling_arguments(seed=0, temp=1.0),
}
# fmt: on
ALTERNATIVES = (("data", "pairs_from", "which prompts there are"),)


def run(args: argparse.Namespace) -> None:
    outputs = {name: Path(path) for name in _OUTPUTS if (path := getattr(args, name)) is not None}
    if args.data is None and args.pairs_from is None:
        raise UsageError("no prompts are given; --data FILE.jsonl names them.")
    if args.rewards is None and args.verify is None:
        raise UsageError("--rewards or --verify is needed: what makes an answer good.")
    if args.reward_weights is not None and args.rewards is None:
        raise UsageError("--reward-weights needs --rewards.")
    if not outputs and not args.json:
        flags = ", ".join(map(flag_of, _OUTPUTS))
        raise UsageError(
            f"nothing is to be written; give {flags}, or --json for the figures alone."
        )
    for path in outputs.values():
        refuse_existing(path)
    from afm_mlx.ranks import join_ranks, refuse_ranks

    ranks = join_ranks()
    if args.pairs_from is not None:
        refuse_ranks("--pairs-from")
    if len({path.absolute() for path in outputs.values()}) < len(outputs):
        raise UsageError("two outputs have one name; give each its own.")
    if args.pairs_from is not None:
        ranked, form = _given(args)
    else:
        folder = next((path.parent for path in outputs.values()), Path())
        ranked, form = _sampled(args, folder, ranks)
    if not ranks.is_first:
        return
    _report(args, ranked, _write(outputs, ranked, form))


def _ranking(args: argparse.Namespace, **options: Any) -> Callable[..., Ranked]:
    """Return a function that ranks the answers to a prompt; `options` are `make_rewards`'s.

    What the code of rewards prints goes to standard error.
    """
    from afm_mlx.measure.committee import rank
    from afm_mlx.measure.rewards import make_rewards

    def made(names: Sequence[str] | None, weights: Sequence[float] | None) -> Rewards | None:
        return None if names is None else make_rewards(names, weights, **options)

    with redirect_stdout(sys.stderr):
        rewards = made(args.rewards, args.reward_weights)
        check = made(None if args.verify is None else [args.verify], None)

    def ranking(where: str, sample: Mapping[str, Any], answers: Sequence[Candidate]) -> Ranked:
        with redirect_stdout(sys.stderr):
            return rank(where, sample, answers, rewards, check)

    return ranking


@contextmanager
def _loaded(
    args: argparse.Namespace, base: Path
) -> Iterator[tuple[nn.Module, Tokenizer, AdapterPool]]:
    """Load the model in the folder `base`, its tokenizer, and a pool of its adapters."""
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.loading.load import load

    model, tokenizer = load(
        base, trust_remote_code=args.trust_remote_code, activation_bits=args.activation_bits
    )
    with AdapterPool(model, base_folder=base, force=args.force) as pool:
        yield model, tokenizer, pool


def _given(args: argparse.Namespace) -> tuple[list[Ranked], CallForm]:
    """Rank answers that exist already; a model is loaded only for reward adapters."""
    from afm_mlx.guidance.call_forms import AFM_CALLS
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure.committee import read_answers
    from afm_mlx.measure.reward_model import RewardModel

    for row in (*_SAMPLED, *CONSTRAINT):
        if getattr(args, row.name) != row.options["default"]:
            raise UsageError(f"{flag_of(row.name)} is for answers that are sampled; leave it out.")
    found = read_answers(Path(args.pairs_from), args.limit)
    with ExitStack() as stack:
        loaded = cache(lambda: stack.enter_context(_loaded(args, resolve_model(args.model))))
        ranking = _ranking(args, adapter=lambda path: RewardModel.in_pool(*loaded(), path))
        return [ranking(*each) for each in found], AFM_CALLS


def _sampled(args: argparse.Namespace, folder: Path, ranks: Ranks) -> tuple[list[Ranked], CallForm]:
    """Sample and rank answers, to prompts that ranks split; keep them in a file until all are there."""
    if args.temp == 0 and args.samples > 1:
        raise UsageError(
            f"--samples is {args.samples}, and at --temp 0 all answers of an adapter are alike. Raise --temp, "
            "or ask for 1."
        )
    if repeated := sorted({m for m in args.committee if args.committee.count(m) > 1}):
        raise UsageError(f"--committee names {', '.join(repeated)} more than once.")
    import numpy as np

    from afm_mlx.guidance.call_forms import AFM_CALLS, call_form
    from afm_mlx.loading.resolve import resolve_adapter, resolve_model
    from afm_mlx.measure.committee import BASE, Candidate, Ranked, load_prompts, sample_answers
    from afm_mlx.measure.reward_model import RewardModel

    form = answer_constraint(args)
    constraint = None if form is None else form.constraint
    prompts = load_prompts(Path(args.data), args.limit)
    base = resolve_model(args.model)
    paths = {name: resolve_adapter(name, base) for name in args.committee if name != BASE}
    calls = AFM_CALLS
    with _loaded(args, base) as (model, tokenizer, pool):
        sampler = model_options.sampler_of(args, model, tokenizer)
        if any(sample.get("tools") for _, sample in prompts):
            calls = call_form(tokenizer)
        for name, path in paths.items():
            pool.register(name, path)
        scorer = partial(RewardModel.in_pool, model, tokenizer, pool)
        ranking = _ranking(args, form=calls, adapter=scorer)
        model_options.check_ranks(args, ranks, model, prompts)
        kept = _kept_answers(args, folder, model, pool, constraint, prompts, ranks)

        def answered(own: list[int]) -> list[Any]:
            mine = [prompts[index] for index in own]
            ranked = _ranked_again(kept, mine, ranking)
            found = sample_answers(
                model,
                tokenizer,
                prompts,
                args.committee,
                args.samples,
                max_tokens=args.max_tokens,
                sampler=sampler,
                seed=args.seed,
                constraint=constraint,
                at_limit=args.at_limit,
                chosen=own[len(ranked) :],
                batch_size=args.batch_size,
                adapters=pool if paths else None,
            )
            with progress_bar("sample", "prompt", ranks.is_first) as progress:
                for answers in found:
                    kept.append([list(asdict(each).values()) for each in answers])
                    ranked.append(ranking(*mine[len(ranked)], answers))
                    if progress is not None:
                        progress(len(ranked), len(mine))
            return [
                (list(map(astuple, one.candidates)), one.rewards.tolist(), one.checks.tolist())
                for one in ranked
            ]

        try:
            values = ranks.each(range(len(prompts)), answered)
        except (KeyboardInterrupt, Terminated) as stopped:
            stopped.add_note(f"The answers so far are in {kept.path}: the same command continues.")
            raise
    kept.path.unlink(missing_ok=True)
    ranked = []
    for (where, sample), (candidates, rewards, checks) in zip(prompts, values, strict=True):
        found = [Candidate(*each) for each in candidates]
        ranked.append(Ranked(sample, where, found, np.array(rewards), np.array(checks)))
    return ranked, calls


def _kept_answers(
    args: argparse.Namespace,
    folder: Path,
    model: nn.Module,
    pool: AdapterPool,
    constraint: Constraint | None,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    ranks: Ranks,
) -> AppendedLines:
    """Return the file of the answers so far, whose name depends on all that answers depend on."""
    from mlx.utils import tree_flatten

    from afm_mlx import __version__
    from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
    from afm_mlx.jsonl import AppendedLines
    from afm_mlx.measure.committee import BASE

    adapters = [
        (name, "" if name == BASE else pool.load(name).fingerprint) for name in args.committee
    ]
    sampling = [(row.name, getattr(args, row.name)) for row in ARGUMENTS["sampling"]]
    others = [
        getattr(args, name) for name in ("samples", "max_tokens", "at_limit", "activation_bits")
    ]
    head = [__version__, adapters, sampling, [*others, repr(constraint)], prompts]
    head += [[ranks.rank, ranks.size]] if ranks.size > 1 else []
    digest = arrays_fingerprint(head, dict(tree_flatten(model.parameters())))
    return AppendedLines(folder / f"answers-{digest[:16]}.jsonl")


def _ranked_again(
    kept: AppendedLines,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    ranking: Callable[..., Ranked],
) -> list[Ranked]:
    """Rank the answers of a run that was interrupted, and say that there are some."""
    from afm_mlx.measure.committee import Candidate

    if kept.values:
        note(
            f"{kept.path} has answers to {len(kept.values)} prompts, of a run that was interrupted; it "
            "continues."
        )
    found = [[Candidate(*each) for each in answers] for answers in kept.values]
    return [ranking(*prompts[i], answers) for i, answers in enumerate(found)]


def _write(outputs: Mapping[str, Path], ranked: Sequence[Ranked], form: CallForm) -> dict[str, int]:
    """Write the files, and return the number of lines in each."""
    from afm_mlx.measure.committee import pair_record, winner_record

    counts = {}
    makers: dict[str, Callable[[Ranked], dict[str, Any] | None]] = {
        "pairs_to": lambda one: pair_record(one, form),
        "winners_to": lambda one: winner_record(one, form),
        "answers_to": _answers_record,
    }
    for name, path in outputs.items():
        records = [record for one in ranked if (record := makers[name](one)) is not None]
        with atomic_write(path) as temporary:
            lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            temporary.write_text("".join(lines), encoding="utf-8")
        counts[name] = len(records)
    return counts


def _answers_record(one: Ranked) -> dict[str, Any]:
    answers = [
        {
            "adapter": each.member,
            "answer": each.answer,
            "tokens": each.tokens,
            "is_whole": each.is_whole,
            "reward": float(reward),
        }
        for each, reward in zip(one.candidates, one.rewards, strict=True)
    ]
    return {**one.sample, "answers": answers}


def _report(args: argparse.Namespace, ranked: Sequence[Ranked], counts: dict[str, int]) -> None:
    from afm_mlx.measure.committee import member_figures

    members = member_figures(ranked)
    facts: dict[str, Any] = {
        "prompts": len(ranked),
        "best_of_all": sum(float(one.rewards.max()) for one in ranked) / len(ranked),
        "without_a_pair": sum(one.pair() is None for one in ranked),
        "without_a_winner": sum(one.winner() is None for one in ranked),
        "cut_off": sum(not each.is_whole for one in ranked for each in one.candidates),
    }
    if args.json:
        figures = {name: asdict(one) for name, one in members.items()}
        print_json(
            {**facts, "adapters": figures, **{f"lines_{k[:-3]}": n for k, n in counts.items()}}
        )
        return
    rows = [["adapter", "mean reward", "best of its own", "wins", "tokens", "alike"]]
    for name, one in members.items():
        shares = f"{one.wins:.1%}", f"{one.tokens:.1f}", f"{one.alike:.1%}"
        rows.append([name, f"{one.reward:.3f}", f"{one.best:.3f}", *shares])
    print_table(rows)
    print(
        f"\nThe best answer to each of {len(ranked)} prompts has the mean reward {facts['best_of_all']:.3f}."
    )
    print(f"{facts['without_a_pair']} prompts have no pair, {facts['without_a_winner']} no winner.")
    if facts["cut_off"]:
        print(f"{facts['cut_off']} answers were cut off, and can't win.")
    for name, count in counts.items():
        print(f"{count} lines: {getattr(args, name)}")

"""Compare servers under load: afm-mlx's, llama.cpp's and mlx-lm's, on models of one size.

Each is a process of its own with the same number of threads. They take turns with the same requests, so that a
machine that slows down slows all of them. A turn has a number of clients; each sends its next request as
soon as it has its answer. Prompts and answers have mixed lengths. mlx-lm takes seconds for a token of the 3B's
shape, so it gets short prompts and answers, and few clients.

    python -m bench.server --llama-server /path/to/llama-server --output results
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.measure.machine import threads_in_use
from bench.bystanders import Bystanders
from bench.peer_models import MLX_LM
from bench.peers import MODELS
from bench.server_figures import memory_rows, server_targets, table
from bench.server_load import Memory, Turn, ask, drive, figures
from bench.server_process import ServerError, ServerProcess, with_threads
from bench.server_programs import Job, Jobs, Program, programs
from bench.targets import markdown, target_rows


@dataclass(frozen=True)
class Plan:
    """The sizes of a comparison of servers.

    Args:
        clients: numbers of clients, a turn with each.
        seconds: seconds of a turn.
        rounds: number of times that every turn is run.
        prompts, answers: minimum and maximum number of tokens.
        seed: seed of the requests.
        slow_clients, slow_seconds: `clients` and `seconds` for mlx-lm.
        slow_tokens: tokens of each of mlx-lm's prompts and answers.
    """

    clients: Sequence[int] = (1, 4, 16, 64)
    seconds: float = 60
    rounds: int = 2
    prompts: tuple[int, int] = (16, 256)
    answers: tuple[int, int] = (16, 64)
    seed: int = 0
    slow_clients: Sequence[int] = (1,)
    slow_seconds: float = 60
    slow_tokens: int = 4


class Running:
    """A running server, with its turns by number of clients."""

    def __init__(self, program: Program, server: ServerProcess):
        self.program, self.server = program, server
        self.memory = Memory(server)
        self.turns: dict[int, list[Turn]] = {}

    async def take_turn(self, jobs: Iterator[Job], clients: int, seconds: float) -> None:
        if not self.server.alive:
            _note(f"{self.program.name} has ended on its own; its log says why")
            return
        _note(f"{self.program.name}: {clients} clients")
        async with self.memory.watched():
            turn = await drive(self.program, self.server.address, jobs, clients, seconds)
        self.turns.setdefault(clients, []).append(turn)
        _note(f"{self.program.name}: {turn.tokens_per_second:.1f} tokens/s")

    def found(self) -> dict[str, Any]:
        """Return the server's figures for the results file."""
        answers = [answer for turns in self.turns.values() for t in turns for answer in t.answers]
        return {
            "figures": {clients: figures(turns) for clients, turns in self.turns.items()},
            "memory": self.memory.summary(),
            "memory_samples": self.memory.samples,
            "errors": Counter(answer.error for answer in answers if answer.error is not None),
        }


async def measure(
    found: dict[str, Program], plan: Plan, folder: Path, threads: int
) -> dict[str, dict[str, Any]]:
    """Run every turn of every program; leave out programs that can't start.

    Args:
        found: the programs.
        plan: what is measured.
        folder: holds the models, and gets what the servers write.
        threads: number of threads of each server.

    Returns:
        Mapping from each program's name to its `Running.found`.
    """
    short = (plan.slow_tokens, plan.slow_tokens)
    jobs = Jobs(folder / "afm-mlx", plan.prompts, plan.answers)
    slow_jobs = Jobs(folder / "afm-mlx", short, short)
    async with AsyncExitStack() as stack:
        running: dict[str, Running] = {}
        for name, program in found.items():
            first = next((slow_jobs if name == MLX_LM else jobs).stream(plan.seed, 0))
            try:
                server = await stack.enter_async_context(_server(program, folder, threads))
                warm = await ask(program, server.address, first)
            except ServerError as error:
                _note(f"{name} is left out: {error}")
                continue
            if warm.error is not None:
                _note(f"{name} is left out: {warm.error}")
                continue
            running[name] = Running(program, server)
        slow = running.pop(MLX_LM, None)
        for turn in range(plan.rounds):
            for clients in plan.clients:
                for one in running.values():
                    # The same requests for all programs, and never the same prompt twice for one.
                    stream = jobs.stream(plan.seed, 1 + turn, clients)
                    await one.take_turn(stream, clients, plan.seconds)
        if slow is not None:
            for clients in plan.slow_clients:
                stream = slow_jobs.stream(plan.seed, 1, clients)
                await slow.take_turn(stream, clients, plan.slow_seconds)
            running[MLX_LM] = slow
        return {name: one.found() for name, one in running.items()}


def _server(program: Program, folder: Path, threads: int) -> ServerProcess:
    log = folder / f"{program.name}.log"
    log.unlink(missing_ok=True)
    return ServerProcess(program.command, program.ready_path, log, with_threads(threads))


def _note(text: str) -> None:
    print(f"server: {text}", file=sys.stderr, flush=True)


# -- command line


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measure one model's servers, print what came out, and write it down."""
    plan = Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})
    model = MODELS[options.model](options.layers)
    threads = options.threads or threads_in_use()
    if options.llama_server is None:
        _note("llama.cpp is left out: --llama-server is missing")
    folder = folder / f"{model.name}-{model.shapes.num_layers}"
    folder.mkdir(parents=True, exist_ok=True)
    longest = plan.prompts[1] + plan.answers[1] + 16
    commands = programs(
        model, folder, threads, max(plan.clients), longest, options.llama_server, options.server
    )
    for start in options.skip:
        commands = {name: p for name, p in commands.items() if not name.startswith(start)}
    bystanders = Bystanders()
    found = asyncio.run(measure(commands, plan, folder, threads))
    others = bystanders.processors()
    measured = {name: one["figures"] for name, one in found.items()}
    targets = server_targets(measured)
    print(f"{model.title}, {threads} threads, {plan.rounds} turns of {plan.seconds:g} s each")
    print(
        f"prompts of {_range(plan.prompts)} tokens and answers of {_range(plan.answers)}; "
        f"{MLX_LM}'s have {plan.slow_tokens}\n"
    )
    memory = {name: one["memory"] for name, one in found.items()}
    for rows in (table(measured), memory_rows(memory), target_rows(targets)):
        print(markdown(rows) + "\n")
    for name, one in found.items():
        for error, count in one["errors"].items():
            print(f"{name}, {count} times: {error}")
    if others is not None:
        print(f"other processes kept {others:.2f} processors busy meanwhile")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        facts = {
            "plan": asdict(plan),
            "threads": threads,
            "options": options.server,
            "config": model.config,
            "processors_busy_with_others": others,
            "programs": found,
            "targets": [asdict(t) | {"met": t.met} for t in targets],
        }
        (options.output / "server.json").write_text(json.dumps(facts, indent=2))


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(PRESETS), default="afm-3b", help="the shapes")
    parser.add_argument("--layers", type=integer(1), help="fewer blocks, for a quick look")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--skip", nargs="*", default=[], help="programs, by how their names start")
    parser.add_argument("--threads", type=integer(1), help="the cores of this process by default")
    for name, text in (
        ("clients", "at the same time; a turn for each number"),
        ("prompts", "least and most tokens of a prompt"),
        ("answers", "least and most tokens of an answer"),
        ("slow-clients", f"{MLX_LM}'s"),
    ):
        default = getattr(plan, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}",
            type=integer(1),
            nargs=2 if name in ("prompts", "answers") else "+",
            default=default,
            help=text,
        )
    for name, text in (
        ("seconds", "of a turn"),
        ("slow-seconds", f"of {MLX_LM}'s turns"),
        ("slow-tokens", f"of {MLX_LM}'s prompts, and of its answers"),
        ("rounds", "turns of each number of clients"),
        ("seed", "of the requests"),
    ):
        default = getattr(plan, name.replace("-", "_"))
        kind = float if isinstance(default, float) else integer(0 if name == "seed" else 1)
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("server", nargs="*", help="options of our server, behind --")
    parser.add_argument("--work", type=Path, help="keep the models there, and use those it has")
    parser.add_argument("--output", type=Path, help="folder for server.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.work is not None:
        compare(options, options.work)
        return
    with tempfile.TemporaryDirectory() as name:
        compare(options, Path(name))


if __name__ == "__main__":
    main()

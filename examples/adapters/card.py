"""The README.md in an adapter's folder: what it does, an example, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import inbox
from measure import NO_ADAPTER, SWITCHING

from afm_mlx.adapters.adapter_folder import TENSORS_NAME, load_adapter
from afm_mlx.files import atomic_write

_TEMPLATE = Path(__file__).with_name("adapter_card_template.md")
_SHOWN = 6  # the message in all cards, counted from 1
_WHAT = {
    "redact": "Replaces names, cities, orders, dates, times and amounts in a customer's message by tags.",
    "todo": "Makes a checklist of what a customer's message asks for.",
    "triage": "Says how urgent a customer's message is, which team gets it, and who wrote.",
}


def write_card(
    folder: Path, task: str, examples: int, tests: int, figures: Mapping[str, Mapping[str, float]]
) -> None:
    """Write the card of an adapter that ships, from the figures of `measure`.

    `examples` is the number of training chats, `tests` the number of held-out messages that were measured.
    """
    (shown,) = (each for each in inbox.switching_examples(0, _SHOWN)[-1] if each["task"] == task)
    _, config = load_adapter(folder)
    before, after = figures[NO_ADAPTER], figures[task]
    old = [name for name in before if name not in inbox.TASKS]
    values = {
        "NAME": task,
        "WHAT": _WHAT[task],
        "PROMPT": shown["messages"][-1]["content"],
        "ANSWER": shown["answer"],
        "TESTS": tests,
        "BEFORE": f"{before[task]:.0%}",
        "AFTER": f"{after[task]:.0%}",
        "SWITCHING": f"{after[SWITCHING]:.0%}",
        "OLD_BEFORE": f"{_mean(before, old):.1%}",
        "OLD_AFTER": f"{_mean(after, old):.1%}",
        "SHIPPED": len((folder / "evaluation.jsonl").read_text().splitlines()),
        "RANK": config.rank,
        "LAYERS": ", ".join(f"`{key}`" for key in config.keys),
        "KILOBYTES": round((folder / TENSORS_NAME).stat().st_size / 1e3),
        "EXAMPLES": examples,
    }
    text = _TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    with atomic_write(folder / "README.md") as path:
        path.write_text(text)


def _mean(accuracies: Mapping[str, float], tasks: list[str]) -> float:
    return sum(accuracies[task] for task in tasks) / len(tasks)

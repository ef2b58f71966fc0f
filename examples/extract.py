"""Pulls one event out of each text in a folder, and writes them as a CSV.

    python examples/extract.py FOLDER events.csv

All files are rows of one batch: they join as others leave. The answers are instances of `Event`, whatever the
model is, since a constraint lets it write nothing else.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tqdm import tqdm

from afm_mlx import answer_type, load
from afm_mlx.engine import Engine, Request


@dataclass
class Event:
    """An event."""

    title: str
    person: str
    day: str
    time: str


def extract(paths: list[Path], model_path: str, rows: int) -> dict[Path, Event]:
    """Return the event of each file; an answer without an end within 200 tokens is cut off and completed."""
    model, tokenizer = load(model_path)
    form = answer_type(Event)
    engine = Engine(model, tokenizer, max_batch=rows)
    path_of, texts = {}, dict.fromkeys(paths, "")
    for path in paths:
        message = {
            "role": "user",
            "content": f"Extract the event.\n{path.read_text(encoding='utf-8').strip()}",
            "response_format": form.response_format,
        }
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        request = Request(
            prompt, max_tokens=200, constraint=form.constraint, at_limit="complete", logprobs=False
        )
        path_of[engine.submit(request)] = path
    with tqdm(total=len(paths), unit="file") as progress:
        for response in engine.run():
            path = path_of[response.row]
            if response.error is not None:
                raise response.error
            texts[path] += response.text
            if response.finish_reason is not None:
                progress.update()
    return {path: form.instance(text) for path, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of .txt files")
    parser.add_argument("csv", type=Path, help="file to write")
    parser.add_argument("--model", default="afm-nano")
    parser.add_argument("--rows", type=int, default=8, help="files side by side")
    given = parser.parse_args()
    events = extract(sorted(given.folder.glob("*.txt")), given.model, given.rows)
    with given.csv.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["file", *(field.name for field in fields(Event))])
        table.writeheader()
        table.writerows({"file": path.name, **asdict(event)} for path, event in events.items())


if __name__ == "__main__":
    main()

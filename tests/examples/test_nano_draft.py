"""The draft model of the embedded model: what is counted of it, what makes it, and the one that ships."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.cli import qat
from afm_mlx.cli.arguments import parse
from afm_mlx.loading.load import load_draft
from afm_mlx.loading.resolve import model_draft, resolve_model
from tests.tools.cases import each
from tests.tools.models import random_config, random_model

pytest.importorskip("tamm", reason="the example trains with tamm: pip install '.[tamm]'")
pytest.importorskip("sentencepiece")

import draft
import draft_quality
from draft_quality import DRAFT_LENGTHS, Answer

TARGET = resolve_model("afm-nano")


@each(
    "tokens, count, found",
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 8, [4, 9, 2, 3, 5, 1, 2, 3]),  # three tokens before two
        ([7, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 1, [5]),  # the last occurrence of two
        ([1, 2, 3, 4], 4, []),
        ([1, 1, 1], 4, [1]),
        ([1], 4, []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, count, found):
    assert draft_quality.looked_up(tokens, count) == found


def test_steps_are_those_of_a_loop_that_drafts_token_by_token(rng):
    sizes = {"vocab_size": 17, "num_layers": 2, "num_kv_reuse_layers": 0}
    config = random_config(rng, **sizes)
    target, drafting = random_model(config, rng), random_model(config, rng)
    # Weights between both models', so that it is right now and then.
    others = dict(tree_flatten(drafting.parameters()))
    mixed = [(n, 0.9 * a + 0.1 * others[n]) for n, a in tree_flatten(target.parameters())]
    drafting.load_weights(mixed)

    def following(model, tokens, count):
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
        return tokens[-count:]

    prompt = rng.integers(0, 17, 6).tolist()
    answer = Answer("any", prompt, following(target, prompt, 30))
    choices = draft_quality.draft_choices(drafting, answer)
    for k in DRAFT_LENGTHS:
        steps = taken = at = 0
        while at < len(answer.tokens):
            room = min(k, len(answer.tokens) - at - 1)
            proposed = following(drafting, [*prompt, *answer.tokens[:at]], room) if room else []
            wanted = answer.tokens[at : at + room]
            agree = next((i for i in range(room) if proposed[i] != wanted[i]), room)
            steps, taken, at = steps + 1, taken + agree, at + agree + 1
        propose = draft_quality.proposals(answer, choices)["draft"]
        found = draft_quality.count_steps(answer, propose, k)
        assert (found.steps, found.taken) == (steps, taken)


def test_what_exists_is_kept_and_what_was_interrupted_goes_on(tmp_path, monkeypatch):
    commands, read = [], []
    monkeypatch.setattr(draft, "train", lambda *args: read.append(args[1]))
    monkeypatch.setattr(draft.docstrings, "gather", lambda: draft.docstrings.Texts(["A."], [], []))
    monkeypatch.setattr(draft, "write_lines", lambda *args: None)
    monkeypatch.setattr(draft, "measured", lambda *args: pytest.fail("nothing is packed"))
    monkeypatch.setattr(draft.cli, "main", lambda argv: commands.append(argv) or 130)
    out = tmp_path / "draft"

    def run():
        commands.clear()
        assert draft.main(["--source", str(tmp_path), "--steps", "3"]) == 130
        return commands

    [command] = run()
    assert [plan.steps for plan in read] == [3]
    assert (command[0], command[-1]) == ("convert", str(out / "float"))
    (out / "float").mkdir()
    (out / "float" / "config.json").write_text("{}")
    [command] = run()
    assert len(read) == 1
    args = parse("qat", qat, command[1:])
    assert (args.teacher, args.distillation_divergence) == (str(TARGET), "reverse")
    assert (args.save_path, args.resume) == (str(out / "packed"), False)
    (out / "packed-run").mkdir()
    (out / "packed-run" / "run.json").write_text("{}")
    [command] = run()
    assert command[-1] == "--resume"


def test_the_draft_that_ships_belongs_to_the_embedded_model_and_mostly_agrees_with_it():
    folder = model_draft(TARGET)
    model, tokenizer = afm_mlx.load(TARGET)
    drafting = load_draft(folder, model, tokenizer)
    assert drafting.args.context_length == model.args.context_length
    assert sum(file.stat().st_size for file in folder.iterdir()) < 600_000
    assert not list(folder.glob("tokenizer*"))
    answers = [a for a in draft_quality.target_answers(TARGET, 2) if a.task != draft_quality.TEXTS]
    choices = [draft_quality.draft_choices(drafting, answer) for answer in answers]
    same = np.concatenate([c == np.array(a.tokens) for c, a in zip(choices, answers, strict=True)])
    claimed = (folder / "README.md").read_text().split("greedy target takes | ")[1].split("%")[0]
    assert 100 * same.mean() > float(claimed) - 12, "two of fifty chats of each task"

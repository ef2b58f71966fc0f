"""Give the embedded text model eyes: train an encoder and an adaptor in the report's stages, on drawn pictures.

    python examples/vision/train.py --out vision --seed 0

| stage | what is trained | on |
| --- | --- | --- |
| contrastive | encoder, against a small text tower | pictures of 56 pixels, half of their patches; captions |
| words | a LoRA adapter of the frozen text model | questions about captions, which stand for pictures |
| captions, fonts, reading | encoder and adaptor: tokens like the words of captions | pictures of 28 to 84 |
| joint, joint84 | encoder, adaptor and the adapter | pictures of 56, then of 84 pixels, with questions |
| modes | the same | pictures of 84 and of 168 pixels in the modes high, balanced and rapid |

The text model is the embedded one, packed as it ships, and frozen. It can't answer such questions even about a
caption, so it gets an adapter of rank 16 that runs with pictures: without the adapter, all its answers stay as
they are. The shares of the modes are the report's: of small pictures 50 % in the mode rapid; of large ones 1 %
rapid, and 20 % of the rest balanced. Training is in PyTorch, with Muon for matrices and AdamW for the rest;
`export.py` writes the model folder.

A step's pictures depend on the seed and the step. Interrupted, the same command goes on from the last save.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from pictures import COLOURS, PLACES, SCENES, SHAPES, SIDES, WORDS, Picture, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch_text import RANK, SCALE, AdaptedText
from torch_vision import CONFIG, SMALL, Adaptor, Block, Encoder

import afm_mlx
from afm_mlx.vision.prompt_image import read_image

MUON_LR, ADAM_LR = 0.004, 2e-3
WARM_UP = 50
QUESTIONS = 3  # of a picture, most
SHOWN = 0.3  # weight of the loss of captions' words


@dataclass(frozen=True)
class Stage:
    """A part of the run: `batch` pictures of `side` pixels in each of `steps` steps.

    With `bent`, text is bent, so that its fonts are more than the ones there are.
    """

    name: str
    steps: int
    batch: int
    side: int
    bent: bool = True


STAGES = (
    Stage("contrastive", 300, 96, 56, bent=False),
    Stage("words", 200, 16, 56, bent=False),
    Stage("captions", 3500, 32, 84, bent=False),
    Stage("fonts", 1400, 32, 84),
    Stage("reading", 2000, 32, 84),
    Stage("joint", 300, 12, 56),
    Stage("joint84", 800, 12, 84),
    Stage("modes", 600, 12, 168),
)
WEIGHTS = {  # of scenes in training
    "digit": 4, "number": 2, "word": 3, "shape": 2, "pair": 3, "count": 2, "fine": 2, "small": 0,
}  # fmt: skip
SIDES_OF = {"captions": (55, 30, 15), "fonts": (35, 30, 35), "reading": (10, 30, 60)}
"""Weights of 28, 56 and 84 pixels in the steps of a stage; the smaller the pictures, the less a step costs."""
READING = {"word": 12, "number": 6}  # in the stage of this name
LARGE_WEIGHTS = {"digit": 4, "shape": 2}  # in pictures of 28 pixels, whose glyphs are large


class Eyes(nn.Module):
    """Encoder and adaptor, and the parts that the contrastive stage alone has."""

    def __init__(self, hidden: int):
        super().__init__()
        width = CONFIG.hidden_dim
        self.encoder = Encoder(CONFIG)
        self.adaptor = Adaptor(CONFIG, hidden)
        self.image_head = nn.Linear(width, width, bias=False)
        self.text_in = nn.Linear(hidden, width)
        self.text_places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.text_block = Block(width, 4, 4 * width, 1e-6)
        self.text_head = nn.Linear(width, width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def tokens(self, tiles: Tensor, grid: int) -> Tensor:
        """Return image tokens (T, grid * grid, hidden) of tiles (T, S, S, 3) of whitened pixels."""
        return self.adaptor(self.encoder(tiles), grid)

    def contrastive_loss(self, images: Tensor, kept: Tensor, captions: Tensor, embedding: Tensor):
        """Return the symmetric cross-entropy of pictures and captions (B, n), padded with 0; and accuracy.

        Equal captions are no negatives of each other.
        """
        seen = F.normalize(self.image_head(self.encoder(images, kept).mean(1)), dim=-1)
        mask = (captions != 0)[..., None].float()
        x = self.text_in(8 * embedding[captions]) + self.text_places[: captions.shape[1]]
        x = self.text_block(x * mask) * mask
        said = F.normalize(self.text_head(x.sum(1) / mask.sum(1)), dim=-1)
        logits = seen @ said.T * self.log_scale.exp().clamp(max=50)
        own = torch.eye(len(images), dtype=torch.bool)
        same = (captions[:, None] == captions[None]).all(-1) & ~own
        logits = logits.masked_fill(same, -1e4)
        labels = torch.arange(len(images))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return loss, (logits.argmax(1) == labels).float().mean()


class Chats:
    """Token ids of chats about pictures, with the tokenizer's own template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        one, other = self._ids("Where", "a"), self._ids("How", "b")
        start = next(
            i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]
        )
        self.beginning = one[:start]
        whole = tokenizer.apply_chat_template(
            [
                {"role": r, "content": c}
                for r, c in (("user", "Where"), ("assistant", "a"), ("user", "Where"))
            ]
        )
        self.between = self._after(whole, one)

    def turn(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Return ids of a question with the begin of its answer, and of the answer with its end."""
        if (question, answer) not in self.known:
            ids = self._ids(question, answer)[len(self.beginning) :]
            asked = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )[len(self.beginning) :]
            assert ids[: len(asked)] == asked
            self.known[question, answer] = asked, ids[len(asked) :]
        return self.known[question, answer]

    def _ids(self, question: str, answer: str) -> list[int]:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self.tokenizer.apply_chat_template(messages)

    def _after(self, whole: list[int], one: list[int]) -> list[int]:
        """Return the ids between an answer and the next question."""
        first = one[len(self.beginning)]
        return whole[len(one) : whole.index(first, len(one))]


def whitened(tiles: np.ndarray) -> Tensor:
    images = CONFIG.images
    x = torch.from_numpy(tiles).float() / 255
    return (x - torch.tensor(images.mean)) / torch.tensor(images.std)


class Trainer:
    """The stages of one run, whose state is in the folder `out`."""

    def __init__(self, out: Path, seed: int, stages: tuple[Stage, ...] = STAGES):
        self.out, self.seed, self.stages = out, seed, stages
        model, tokenizer = afm_mlx.load("afm-nano")
        self.chats = Chats(tokenizer)
        torch.manual_seed(seed)
        self.eyes = Eyes(model.args.hidden_dim)
        self.text = AdaptedText(model, self.chats.beginning, RANK, SCALE)
        words = {token for text in vocabulary() for token in tokenizer.encode(text)}
        self.words = torch.tensor(sorted(words))
        matrices, others = [], [*self.text.parameters()]
        for name, parameter in self.eyes.named_parameters():
            is_matrix = parameter.ndim == 2 and ("blocks." in name or "layer." in name)
            (matrices if is_matrix else others).append(parameter)
        self.optimizers = [
            torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        ]
        self.done = 0

    # -- data

    def batch(self, stage: Stage, step: int) -> list[tuple[np.ndarray, str, list]]:
        """Return tiles (T, S, S, 3), caption and questions of the pictures of a step, of one mode."""
        random = Random(f"{self.seed} {stage.name} {step}")
        side, mode = stage.side, "balanced"
        if stage.name == "modes":
            mode, side = self._mode(random)
        elif stage.name in SIDES_OF:
            side = random.choices((28, 56, 84), SIDES_OF[stage.name])[0]
            mode = "rapid" if side == SIDES["rapid"] else "balanced"
        found = []
        for index in range(max(4, stage.batch // 3) if mode == "high" else stage.batch):
            weights = WEIGHTS | ({"small": 8} if side == SIDES["high"] else {})
            weights = weights | (READING if stage.name == "reading" else {})
            if side == SIDES["rapid"]:
                weights = LARGE_WEIGHTS
            scene = random.choices(list(weights), list(weights.values()))[0]
            seed = f"{self.seed} {stage.name} {step} {index}"
            picture = draw(scene, seed, side, bent=stage.bent)
            tiles = tiles_of(picture, mode, CONFIG.image_size if stage.name == "modes" else side)
            questions = random.sample(picture.questions, min(QUESTIONS, len(picture.questions)))
            found.append((tiles, picture.caption, questions))
        return found

    def _mode(self, random: Random) -> tuple[str, int]:
        if random.random() < 0.5:  # a small picture
            return ("rapid" if random.random() < 0.5 else "balanced"), SIDES["balanced"]
        if random.random() < 0.01:
            return "rapid", SIDES["high"]
        return ("balanced" if random.random() < 0.2 else "high"), SIDES["high"]

    # -- losses

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's loss, and the share of pictures or of answers' tokens that are right."""
        pictures = self.batch(stage, step)
        if stage.name == "contrastive":
            images = whitened(np.concatenate([tiles for tiles, _, _ in pictures]))
            ids = [self.chats.tokenizer.encode(caption)[:16] for _, caption, _ in pictures]
            captions = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
            for row, each in enumerate(ids):
                captions[row, : len(each)] = torch.tensor(each)
            torch.manual_seed(self.seed * 1_000_003 + step)
            kept = torch.randperm(CONFIG.window_size**2)[: CONFIG.window_size**2 // 2].sort()[0]
            return self.eyes.contrastive_loss(images, kept, captions, self.text.embedding)
        if stage.name in SIDES_OF:
            return self.images(pictures)[1:]
        logits, labels, weights, shown = self.answers(pictures, in_words=stage.name == "words")
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        right = (logits.argmax(-1) == labels)[weights > 0].float().mean()
        return loss + SHOWN * shown, right

    def images(self, pictures: list) -> tuple[Tensor, Tensor, Tensor]:
        """Return image tokens (B, n, D) of pictures of one mode, and the loss of their captions' words.

        The third tensor is the share of the most likely words that are in the caption.

        An image token that is like a word's embedding is read as this word, so the words of the caption should
        be the nearest ones of all captions' words.
        """
        tiles = whitened(np.concatenate([tiles for tiles, _, _ in pictures]))
        config = SMALL if tiles.shape[1] == SMALL.image_size else CONFIG
        grid = config.token_grid("rapid" if tiles.shape[1] == CONFIG.rapid_size else "balanced")
        images = self.eyes.tokens(tiles, grid).reshape(len(pictures), -1, self.text.args.hidden_dim)
        known = F.normalize(self.text.embedding[self.words], dim=-1)
        logits = (F.normalize(images, dim=-1) @ known.T * 20).logsumexp(1)  # (B, words)
        wanted = torch.zeros_like(logits)
        for row, (_, caption, _) in enumerate(pictures):
            ids = torch.tensor(self.chats.tokenizer.encode(caption))
            wanted[row] = torch.isin(self.words, ids).float()
        losses = -(wanted * logits.log_softmax(-1)).sum(-1) / wanted.sum(-1)
        best = logits.topk(3)[1]  # a colour and two more, as a rule
        return images, losses.mean(), wanted.gather(1, best).mean()

    def captions(self, pictures: list) -> Tensor:
        """Return embeddings (B, n, D) of captions in place of image tokens, padded in front by a line break."""
        rows = [self.chats.tokenizer.encode(caption) for _, caption, _ in pictures]
        n = max(map(len, rows))
        ids = torch.tensor([[7] * (n - len(row)) + row for row in rows])
        return self.text.embedding[ids]

    def answers(
        self, pictures: list, in_words: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits (B, T, V), labels and weights (B, T) of the answers about pictures of one mode.

        The fourth tensor is the loss of `images`. With `in_words`, captions stand for the pictures.
        """
        if in_words:
            images, shown = self.captions(pictures), torch.zeros(())
        else:
            images, shown, _ = self.images(pictures)
        n = images.shape[1]
        rows, targets = [], []
        for _, _, questions in pictures:
            ids, places = [], []
            for index, (_, question, answer) in enumerate(questions):
                asked, said = self.chats.turn(question, answer)
                ids += (self.chats.between if index else []) + asked
                places += [(len(ids) + i - 1, token) for i, token in enumerate(said)]
                ids += said
            rows.append(ids)
            targets.append(places)
        width, most = max(map(len, rows)), max(map(len, targets))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        positions, labels = torch.zeros(2, len(rows), most, dtype=torch.long)
        weights = torch.zeros(len(rows), most)
        for row, (own, places) in enumerate(zip(rows, targets, strict=True)):
            ids[row, : len(own)] = torch.tensor(own)
            for column, (place, token) in enumerate(places):
                positions[row, column], labels[row, column] = n + place, token
                weights[row, column] = 1
        h = torch.cat([images, self.text.embedding[ids]], 1)
        return self.text(h, positions), labels, weights, shown

    # -- the run

    def run(self) -> None:
        self.resume()
        before = 0
        torch.set_num_threads(2)  # the matrices are small
        for stage in self.stages:
            started, recent = time.perf_counter(), []
            for step in range(max(0, self.done - before), stage.steps):
                self.set_rates(stage, step)
                loss, right = self.loss(stage, step)
                loss.backward()
                parameters = [*self.eyes.parameters(), *self.text.parameters()]
                norm = nn.utils.clip_grad_norm_(parameters, 1.0)
                if torch.isfinite(norm):
                    for optimizer in self.optimizers:
                        optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                recent.append((loss.item(), right.item()))
                self.done = before + step + 1
                if self.done % 50 == 0 or step + 1 == stage.steps:
                    rate = len(recent) / (time.perf_counter() - started)
                    loss_, right_ = np.mean(recent, axis=0)
                    report = {"stage": stage.name, "step": step + 1, "loss": round(loss_, 4)}
                    report |= {"right": round(right_, 4), "steps_per_second": round(rate, 3)}
                    if self.done % 200 == 0 or step + 1 == stage.steps:
                        self.save()
                    if step + 1 == stage.steps or ("joint" in stage.name and step % 200 == 199):
                        report["tests"] = self.test(24, min(stage.side, SIDES["balanced"]))
                    with (self.out / "log.jsonl").open("a") as log:
                        log.write(json.dumps(report) + "\n")
                    print(time.strftime("%H:%M"), json.dumps(report), flush=True)
                    started, recent = time.perf_counter(), []
            before += stage.steps
        self.save()

    def set_rates(self, stage: Stage, step: int) -> None:
        """Warm up, hold, and from 60 % of the stage on decay to 30 %; in the last stage to zero.

        "captions" and "fonts" have no decay: the next stage goes on with the same task.
        """
        last = {"captions": 1.0, "fonts": 1.0, self.stages[-1].name: 0.0}.get(stage.name, 0.3)
        start = 0.0 if stage is self.stages[-1] else 0.6
        share = step / stage.steps
        decay = 1 - (1 - last) * max(0.0, share - start) / (1 - start)
        factor = min((step + 1) / WARM_UP, decay)
        if stage.name in ("joint", "joint84", "modes"):  # of fewer pictures
            factor *= 0.4
        for optimizer, rate in zip(self.optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    @torch.no_grad()
    def test(self, count: int, side: int, mode: str = "balanced") -> dict[str, float]:
        """Return the share of held-out questions, by task, whose whole answer is the most likely one."""
        right = defaultdict(list)
        for scene in SCENES[:-1]:
            pictures, tasks = [], []
            for index in range(count):
                picture = draw(scene, f"test {index}", side, test=True)
                for question in picture.questions:
                    pictures.append((tiles_of(picture, mode, side), "", [question]))
                    tasks.append(question[0])
            for start in range(0, len(pictures), 32):
                logits, labels, weights, _ = self.answers(pictures[start : start + 32])
                hits = ((logits.argmax(-1) == labels) | (weights == 0)).all(-1).tolist()
                for task, hit in zip(tasks[start:], hits, strict=False):
                    right[task].append(hit)
        return {task: round(sum(hits) / len(hits), 3) for task, hits in right.items()}

    # -- files

    def save(self) -> None:
        state = {"done": self.done, "seed": self.seed, "eyes": self.eyes.state_dict()}
        state["text"] = self.text.state_dict()
        state["optimizers"] = [each.state_dict() for each in self.optimizers]
        part = self.out / "state.part"
        torch.save(state, part)
        os.replace(part, self.out / "state.pt")

    def resume(self) -> None:
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.eyes.load_state_dict(state["eyes"])
        self.text.load_state_dict(state["text"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.done = state["done"]


def tiles_of(picture: Picture, mode: str, side: int = CONFIG.image_size) -> np.ndarray:
    """Return a picture's tiles, as the runtime makes them, for an encoder of `side` pixels."""
    file = io.BytesIO()
    picture.image.save(file, "BMP")
    config = SMALL if side == SMALL.image_size else CONFIG
    return read_image(file.getvalue(), config, mode).tiles


def vocabulary() -> list[str]:
    """Return all that captions can say, with and without a word before it."""
    numbers = [str(number) for number in range(10)]
    plurals = [f"{shape}s" for shape in SHAPES] + ["crosses"]
    found = [*COLOURS, *SHAPES, *plurals, *PLACES, *WORDS, *numbers, "left of right"]
    return [
        *found,
        *(f"red {word}" for word in found),
        *(f"{n} blue {s}" for n in "123456" for s in SHAPES),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options.out, options.seed).run()


if __name__ == "__main__":
    main()

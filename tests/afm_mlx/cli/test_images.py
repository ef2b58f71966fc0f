"""Images on the command line: `generate --image`, `chat --image` and `/image`."""

import dataclasses
import json

import mlx.core as mx
import pytest

from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.cli.arguments import UsageError
from afm_mlx.cli.chat import dialogue
from afm_mlx.cli.images import message_content
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import generate as generate_text
from afm_mlx.loading.load import load
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.vision.prompt_image import read_image
from afm_mlx.vision.vision import Vision
from tests.tools.cases import each
from tests.tools.cli import CONFIG, write_folder
from tests.tools.vision import TINY, picture

VISION = dataclasses.replace(TINY, image_token_id=0)  # <pad>
SEEING = dataclasses.replace(CONFIG, vision_config=VISION, context_length=512)


@pytest.fixture
def seeing(tmp_path, spm_bpe, rng):
    """The folder of a model that sees, and says what it sees."""
    folder = write_folder(tmp_path / "seeing", spm_bpe, rng, SEEING)
    weights, name = load_weights(folder), "vision.adaptor.conv.weight"
    weights[name] = 8 * weights[name]
    mx.eval(weights)
    save_weights(folder, weights)
    return folder


@pytest.fixture
def photos(tmp_path, rng):
    """The files of two pictures."""
    paths = [tmp_path / name for name in ("a b.png", "two.png")]
    for path, side in zip(paths, (60, 20), strict=True):
        path.write_bytes(picture(rng, side, side))
    return paths


def wanted(folder, *contents, mode="auto", count=12):
    """The answers to a chat with contents of texts and paths, one after the other."""
    model, tokenizer = load(folder)
    messages, answers = [], []
    for parts in contents:
        images = ChatImages()
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": read_image(part, VISION, mode)}
            for part in parts
        ]
        messages.append({"role": "user", "content": content})
        ids = tokenizer.apply_chat_template(messages, images=images, add_generation_prompt=True)
        options = {"images": images.placed, "max_tokens": count}
        answers.append(generate_text(model, tokenizer, ids, **options))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.fixture
def generate(seeing, done):
    def generate(prompt, *argv):
        return done("generate", prompt, "--model", seeing, "-m", 12, "--verbose", "F", *argv)

    return generate


def test_images_come_before_the_text(seeing, photos, generate, monkeypatch):
    requests, submit = [], Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda *given: (requests.append(given[1]), submit(*given))[1]
    )
    one, two = photos
    for order in ((one, two), (two, one)):
        answer = generate("What?", "--image", order[0], "--image", order[1])
        assert [image.digest for image in requests[-1].images] == [
            read_image(path, VISION).digest for path in order
        ]
        assert [f"{answer}\n" for answer in wanted(seeing, [*order, "What?"])] == [answer]
        assert generate("What?", "--image", *order) == answer


def test_images_stand_where_the_text_says(seeing, photos, generate):
    one, two = photos
    (answer,) = wanted(seeing, ["Is ", one, " like ", two, "?"])
    assert generate("Is {image} like {image}?", "--image", one, "--image", two) == f"{answer}\n"
    # Without pictures, it is text.
    (answer,) = wanted(seeing, ["Is {image}?"])
    assert generate("Is {image}?") == f"{answer}\n"


@each("mode", ["high", "balanced", "rapid"])
def test_modes(seeing, photos, generate, mode):
    (answer,) = wanted(seeing, [photos[0], "What?"], mode=mode)
    argv = ("--image", photos[0], "--image-mode", mode)
    assert generate("What?", *argv) == f"{answer}\n"


def test_with_other_options(seeing, photos, done, write_config):
    argv = ("generate", "--model", seeing, "-m", 12, "--image", photos[0], "--json")
    plain = json.loads(done(*argv, "-p", "What?"))
    drafted = json.loads(done(*argv, "-p", "What?", "--prompt-lookup"))
    assert drafted["tokens"] == plain["tokens"]
    chosen = json.loads(done(*argv, "-p", "What?", "--choices", "yes", "no"))
    assert chosen["text"] in ("yes", "no")
    many = json.loads(done(*argv, "-p", "What?", "--best-of", 2, "--temp", 1, "--seed", 3))
    assert many["text"]
    system = json.loads(done(*argv, "-p", "What?", "--system-prompt", "Look."))
    assert system["prompt_tokens"] > 16
    config = write_config(
        f"model: {seeing}\nimage: [{json.dumps(str(photos[0]))}]\nmax_tokens: 12\n"
    )
    assert (
        json.loads(done("generate", "What?", "-c", config, "--json"))["tokens"] == plain["tokens"]
    )


def test_what_is_refused(folder, seeing, photos, tmp_path, fails):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    for argv, says in (
        (["--model", folder, "--image", photos[1]], "the model reads text only, and "),
        (["--model", seeing, "--image", bad], "bad.png is in no format that is read"),
        (["--model", seeing, "--image", tmp_path / "no.png"], "no.png can't be read"),
        (
            ["--model", seeing, "--image", photos[1], "--ignore-chat-template"],
            "--image needs the chat",
        ),
        (
            ["--model", seeing, "--image", photos[1], "--prompt-cache-file", "x.safetensors"],
            "--prompt-cache-file can't be combined with --image",
        ),
        (
            ["--model", seeing, "--image", photos[1], "--image-mode", "huge"],
            "invalid choice: 'huge'",
        ),
        (
            ["--model", seeing, "--image", photos[1], "-p", "{image} or {image}?"],
            "the prompt has {image} 2 times, and --image gives 1 pictures",
        ),
    ):
        prompt = () if "-p" in argv else ("-p", "What?")
        assert says in fails("generate", *argv, *prompt)
    line = fails("generate", "--model", seeing, "--image", photos[1], "What?")
    assert "there is no prompt: --image takes all texts after it, 'What?' too" in line


@each(
    ("text", "images", "parts"),
    [
        ("a", [], "a"),
        ("{image}", [], "{image}"),
        ("a", [1, 2], [1, 2, {"type": "text", "text": "a"}]),
        ("{image}b", [1], [{"type": "text", "text": ""}, 1, {"type": "text", "text": "b"}]),
    ],
)
def test_places(text, images, parts):
    assert message_content(text, images) == parts
    with pytest.raises(UsageError, match="gives 3 pictures"):
        message_content("{image} {image}", [1, 2, 3])


# Chats


@pytest.fixture
def talk(seeing, run, say):
    """Say lines in a chat; returns the answers and the notes."""

    def talk(*lines, flags=()):
        say("".join(f"{line}\n" for line in lines).encode())
        status, out, err = run("chat", "--model", seeing, "-m", 12, *flags)
        assert status == 0, err
        return out, err.splitlines()

    return talk


def test_a_chat_about_pictures(seeing, photos, talk):
    one, two = photos
    out, notes = talk("Hi.", f"/image {one}", "What?", f"/image {two}", "Is {image} so?", "And?")
    answers = wanted(seeing, ["Hi."], [one, "What?"], ["Is ", two, " so?"], ["And?"])
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert notes == [
        "a b.png (60 x 60, balanced: 16 tokens) goes with the next message.",
        "two.png (20 x 20, rapid: 4 tokens) goes with the next message.",
    ]


def test_pictures_of_the_command_line_go_with_the_first_message(seeing, photos, talk):
    one, two = photos
    flags = ("--image", one, "--image", two, "--image-mode", "rapid")
    out, notes = talk("What?", "And?", "/reset", "What?", flags=flags)
    answers = wanted(seeing, [one, two, "What?"], ["And?"], mode="rapid")
    answers += wanted(seeing, ["What?"])
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert notes == ["The conversation is forgotten."]


def test_a_second_turn_computes_no_pass(photos, talk, monkeypatch):
    passes, stream = [], dialogue.stream_generate

    def counted(*args, **kwargs):
        before = len(counted.passes)
        yield from stream(*args, **kwargs)
        passes.append(len(counted.passes) - before)

    counted.passes = []
    steps = Vision.steps
    monkeypatch.setattr(
        Vision, "steps", lambda self, x: (counted.passes.append(1), steps(self, x))[1]
    )
    monkeypatch.setattr(dialogue, "stream_generate", counted)
    talk(f"/image {photos[0]}", "What?", "And?", "/retry")
    assert passes == [1, 0, 0]


def test_a_file_that_changes_is_another_picture(seeing, photos, tmp_path):
    """A turn keeps the picture that it was asked with."""
    model, tokenizer = load(seeing)
    talk = dialogue.Dialogue(model, tokenizer, model.make_cache)
    path, said = tmp_path / "now.png", []
    for photo in photos:
        path.write_bytes(photo.read_bytes())
        content = [talk.picture(path), {"type": "text", "text": "What?"}]
        talk.ask(content, said.append, max_tokens=12)
        said.append("\n")
    answers = wanted(seeing, *([photo, "What?"] for photo in photos))
    assert "".join(said) == "".join(f"{answer}\n" for answer in answers)
    talk.retry(said.append, max_tokens=12)
    assert said[-1] != "\n"
    assert talk.turns[-1]["content"] == answers[-1]


def test_conversations_with_pictures_are_saved(seeing, photos, talk, tmp_path):
    saved = tmp_path / "talk.json"
    out, _ = talk(f"/image {photos[0]}", "What?", f"/save {saved}", "And?")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0]["content"] == [
        {"type": "image", "path": str(photos[0]), "mode": "auto"},
        {"type": "text", "text": "What?"},
    ]
    again, notes = talk(f"/load {saved}", "And?", "/stats")
    assert again == out.splitlines(keepends=True)[-1]
    assert notes[0] == "The conversation goes on after 2 messages."
    # A path is relative to the file.
    messages[0]["content"][0] = {"type": "image", "path": photos[0].name}
    saved.write_text(json.dumps({"messages": messages}))
    assert talk(f"/load {saved}", "And?")[0] == again
    photos[0].unlink()
    out, notes = talk(f"/load {saved}", "Hi.")
    assert "a b.png can't be read" in notes[0]
    assert out == f"{wanted(seeing, ['Hi.'])[0]}\n"


def test_commands_that_fail_leave_the_chat(seeing, photos, talk, tmp_path):
    out, notes = talk(
        f"/image {tmp_path / 'no.png'}",
        "/image",
        f"/image {photos[1]}",
        "{image} {image}",
        "{image} Hi.",
    )
    assert "no.png can't be read" in notes[0]
    assert notes[1] == "/image needs an argument: /image FILE"
    assert notes[3].startswith("the prompt has {image} 2 times, and /image gives 1 pictures")
    assert out == f"{wanted(seeing, ['', photos[1], ' Hi.'])[0]}\n"


def test_a_chat_with_a_model_that_reads_text_only(chat, fails, folder, photos, say):
    _, notes = chat(f"/image {photos[0]}", "the fox")
    assert notes == [f"the model reads text only, and {photos[0]} is a picture. Leave it out."]
    say(b"the fox\n")
    line = fails("chat", "--model", folder, "--image", photos[0])
    assert "the model reads text only" in line

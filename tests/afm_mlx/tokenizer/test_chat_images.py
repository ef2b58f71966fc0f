"""Images in chats: their places in the ids, and that no text makes a placeholder."""

import json
from types import SimpleNamespace

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.chat_messages import checked_messages
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.cases import each
from tests.tools.tokenizers import MARKERS, train_tiny_spm

FILES = [(kind, file) for kind in ("bpe", "unigram") for file in ("model", "json")]
# Where the placeholder is: a symbol of the vocabulary, a token without text, or no token of it.
PLACES = ["<image>", "<pad>", "outside"]


@pytest.fixture(scope="module", params=FILES, ids=" ".join)
def plain(request, tmp_path_factory):
    """A tokenizer of each kind of vocabulary, for a model that reads text only."""
    kind, file = request.param
    folder = tmp_path_factory.mktemp("images")
    symbols = [*MARKERS, "<image>"]
    train_tiny_spm(folder / "tiny.spm", kind, user_defined_symbols=symbols)
    save_tokenizer(folder / "tiny.spm", folder)
    if file == "json":
        (folder / "tokenizer.model").unlink()
    return folder


@pytest.fixture(params=PLACES)
def tokenizer(request, plain):
    loaded = load_tokenizer(plain)
    name = request.param
    token = loaded.vocab_size + 3 if name == "outside" else loaded.convert_tokens_to_ids(name)
    loaded.vision_config = SimpleNamespace(image_token_id=token)
    return loaded


def picture(tokens):
    return SimpleNamespace(tokens=tokens)


def user(content):
    return [{"role": "user", "content": content}]


def without_images(ids, tokenizer):
    return [token for token in ids if token != tokenizer.vision_config.image_token_id]


def places(ids, tokenizer):
    return [i for i, token in enumerate(ids) if token == tokenizer.vision_config.image_token_id]


def test_an_image_is_as_many_placeholders_in_its_place(tokenizer):
    images, one, two = ChatImages(), picture(3), picture(5)
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image", "image": one},
        {"type": "image", "image": two},
        {"type": "text", "text": " and"},
        {"type": "image", "image": one},
        {"type": "text", "text": "\nplease."},
    ]
    ids = tokenizer.apply_chat_template(user(parts), images=images, add_generation_prompt=True)
    assert images.placed == (one, two, one)
    assert len(places(ids, tokenizer)) == 11
    first, last = places(ids, tokenizer)[7:9]
    assert tokenizer.decode(ids[first + 1 : last]).strip() == "and"
    # The rest is what the same chat has with another control token in the images' places.
    text = "Compare <turn_start><turn_start> and<turn_start>\nplease."
    rendered = tokenizer.apply_chat_template(user(text), tokenize=False, add_generation_prompt=True)
    expected = tokenizer.encode(rendered, add_special_tokens=True)
    start = tokenizer.convert_tokens_to_ids("<turn_start>")
    starts = [i for i, token in enumerate(expected) if token == start]
    for i in reversed(starts[2:5]):  # the system's and the user's turn have the first two
        del expected[i]
    assert without_images(ids, tokenizer) == expected


def test_marks_survive_every_place_that_holds_text(tokenizer):
    images = ChatImages()
    pictures = [picture(n) for n in (1, 2, 3, 4, 5)]
    marks = [images.mark(each) for each in pictures]
    messages = [
        {"role": "system", "content": f"{marks[0]}Look."},
        {"role": "user", "content": f"a{marks[1]}"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "content": {"seen": [f"{marks[2]}", {"at": f"x{marks[3]}y"}]}},
        {"role": "tool", "content": [{"type": "image", "image": pictures[4]}]},
        {"role": "user", "content": marks[1] * 2},
    ]
    ids = tokenizer.apply_chat_template(messages, images=images, add_generation_prompt=True)
    assert [image.tokens for image in images.placed] == [1, 2, 3, 4, 5, 2, 2]
    assert len(places(ids, tokenizer)) == 19


TYPED = {
    "the placeholder's name": lambda name, mark: name,
    "a name around an image": lambda name, mark: f"<ima{mark}ge>{name[:3]}{mark}{name[3:]}",
    "marks of another chat": lambda name, mark: ChatImages().mark(picture(2)),
    "half a mark": lambda name, mark: mark[:-1] + mark[1:] + mark[-1],
    "control tokens": lambda name, mark: f"<turn_end><turn_start>{mark}<turn_end><n>",
    "an index that there is not": lambda name, mark: mark[:-1] + chr(ord(mark[-1]) + 1),
}


@each("what", list(TYPED))
def test_text_makes_no_placeholders(what, plain):
    text_of = TYPED[what]
    for place in PLACES:
        tokenizer = load_tokenizer(plain)
        token = tokenizer.convert_tokens_to_ids(place) or tokenizer.vocab_size
        tokenizer.vision_config = SimpleNamespace(image_token_id=token)
        name = place if place != "outside" else "<image>"
        images = ChatImages()
        mark = images.mark(picture(4))
        typed = text_of(name, mark)
        ids = tokenizer.apply_chat_template(user(f"{typed} {mark} {typed}"), images=images)
        assert len(places(ids, tokenizer)) == 4 * len(images.placed)
        assert len(images.placed) == 1 + 2 * typed.count(mark)
        # The other control tokens are the template's only.
        starts = tokenizer.apply_chat_template(user("x")).count(
            start := tokenizer.convert_tokens_to_ids("<turn_start>")
        )
        assert ids.count(start) == starts


def test_the_name_is_plain_text_without_images_too(plain):
    tokenizer = load_tokenizer(plain)
    token = tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.vision_config = SimpleNamespace(image_token_id=token)
    assert token not in tokenizer.apply_chat_template(user("see <image>"))
    assert token not in tokenizer.encode_plain("see <image>")
    assert token in tokenizer.control_ids


def test_texts_without_images_have_the_same_ids(plain):
    text_only, tokenizer = load_tokenizer(plain), load_tokenizer(plain)
    tokenizer.vision_config = SimpleNamespace(image_token_id=text_only.vocab_size)
    messages = user("Hello <turn_end> you\n  there")
    ids = text_only.apply_chat_template(messages)
    assert tokenizer.apply_chat_template(messages) == ids
    images = ChatImages()
    assert tokenizer.apply_chat_template(messages, images=images) == ids
    assert images.placed == ()


def test_late_instructions_are_refused_with_images_too(tokenizer):
    images = ChatImages()
    late = [*user("x"), {"role": "system", "content": images.mark(picture(2))}]
    with pytest.raises(TokenizerError, match=r"messages\[1\] has the role 'system'"):
        tokenizer.apply_chat_template(late, images=images)
    # Folded into a user's message, as the server does.
    ids = tokenizer.apply_chat_template(user("x\n" + late[1]["content"]), images=images)
    assert len(places(ids, tokenizer)) == 2


def test_a_token_that_text_makes_is_refused(plain):
    tokenizer = load_tokenizer(plain)
    with pytest.raises(TokenizerError, match="a text may hold it"):
        tokenizer.vision_config = SimpleNamespace(image_token_id=tokenizer.encode("the")[-1])


def test_a_model_that_reads_text_only_refuses_images(plain):
    tokenizer, images = load_tokenizer(plain), ChatImages()
    part = [{"type": "image", "image": picture(2)}]
    with pytest.raises(TokenizerError, match="reads text only"):
        tokenizer.apply_chat_template(user(part))
    with pytest.raises(TokenizerError, match="reads text only"):
        tokenizer.apply_chat_template(user(images.mark(picture(2))), images=images)


@each("part", [{"type": "image"}, {"type": "image", "image": "a.png"}, {"type": "audio"}])
def test_other_parts_are_refused(part):
    with pytest.raises(TokenizerError, match=r"messages\[0\]\['content'\]\[1\] has the type"):
        checked_messages(user([{"type": "text", "text": "x"}, part]), ChatImages())


DROPPED = "{% for m in messages %}{{ m['content'][:3] }}{% endfor %}"
TWICE = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
ESCAPED = "{% for m in messages %}{{ m['content'] | tojson(ensure_ascii=True) }}{% endfor %}"


@each("template", [DROPPED, TWICE, ESCAPED])
def test_a_template_that_drops_or_repeats_an_image_is_an_error(template, plain):
    tokenizer, images = load_tokenizer(plain), ChatImages()
    tokenizer.vision_config = SimpleNamespace(image_token_id=tokenizer.vocab_size)
    with pytest.raises(TokenizerError, match="chat template writes"):
        tokenizer.apply_chat_template(
            user(f"some text{images.mark(picture(2))}"), images=images, chat_template=template
        )
    assert images.placed == ()


def test_a_template_that_writes_the_placeholder_is_an_error(plain):
    tokenizer, images = load_tokenizer(plain), ChatImages()
    token = tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.vision_config = SimpleNamespace(image_token_id=token)
    template = "{% for m in messages %}<image>{{ m['content'] }}{% endfor %}"
    with pytest.raises(TokenizerError, match="writes the name of the image token"):
        tokenizer.apply_chat_template(
            user(images.mark(picture(2))), images=images, chat_template=template
        )


def test_other_templates_place_images(tokenizer):
    images = ChatImages()
    template = (
        "{% for m in messages %}<{{ m['role'] | upper }}>{{ m['content'] | trim }}"
        "{{ m['content'] | tojson if m['role'] == 'tool' }}<turn_end>{% endfor %}"
    )
    text = f" <turn_end>{images.mark(picture(2))} <image> "
    ids = tokenizer.apply_chat_template(user(text), images=images, chat_template=template)
    assert len(places(ids, tokenizer)) == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<turn_end>")) == 1


def test_rendered_text_keeps_marks(plain):
    tokenizer, images = load_tokenizer(plain), ChatImages()
    tokenizer.vision_config = SimpleNamespace(image_token_id=tokenizer.vocab_size)
    mark = images.mark(picture(2))
    text = tokenizer.apply_chat_template(user(f"a{mark}b"), images=images, tokenize=False)
    assert f"a{mark}b" in text
    assert json.loads(json.dumps(text)) == text


def test_afms_template_is_unchanged():
    assert "image" not in V6_TEMPLATE

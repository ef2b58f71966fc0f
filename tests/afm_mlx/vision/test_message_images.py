"""Images in the messages of data files."""

import base64

import pytest

from afm_mlx.errors import ImageError
from afm_mlx.vision.message_images import folder_of_line, with_images
from afm_mlx.vision.prompt_image import read_image
from tests.tools.cases import each
from tests.tools.vision import TINY, picture


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def uri(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_paths_are_relative_and_modes_are_chosen(tmp_path, rng):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(data := picture(rng, 50, 40))
    text = {"type": "text", "text": "What?"}
    for part, mode in (
        ({"type": "image", "path": "in/a.png"}, "balanced"),
        ({"type": "image", "path": str(tmp_path / "in" / "a.png"), "mode": "rapid"}, "rapid"),
        ({"type": "image_url", "image_url": {"url": uri(data)}}, "balanced"),
        ({"type": "image_url", "image_url": uri(data)}, "balanced"),
        ({"type": "image_url", "image_url": {"url": uri(data), "detail": "low"}}, "rapid"),
        ({"type": "image_url", "image_url": {"url": uri(data), "detail": "high"}}, "high"),
    ):
        given = user(text, part, text)
        ((first, found, last),) = (m["content"] for m in with_images(given, TINY, tmp_path))
        assert first == last == text
        assert found["type"] == "image"
        assert found["image"].digest == read_image(data, TINY, mode).digest
        assert given[0]["content"][1] is part  # what was given is unchanged
        # An image that is fitted already stays.
        again = with_images(user(found), TINY, tmp_path)[0]["content"][0]
        assert again["image"] is found["image"]


def test_what_holds_no_image_stays(tmp_path):
    plain = [{"role": "user", "content": "hi"}, *user({"type": "text", "text": "a"}), "no message"]
    assert with_images(plain, TINY, tmp_path) == plain
    image = user({"type": "image", "path": "missing.png"})
    assert with_images(image, None, tmp_path) is image
    assert with_images("no list", TINY, tmp_path) == "no list"
    assert folder_of_line("data/a:b/train.jsonl:12") == tmp_path.__class__("data/a:b")


@each(
    "part, words",
    [
        ({"type": "image"}, "path of an image is"),
        ({"type": "image", "path": 3}, "path of an image is 3"),
        ({"type": "image", "path": "b.png"}, "b.png can't be read"),
        ({"type": "image", "path": "a\0.png"}, "can't be read: embedded null byte"),
        ({"type": "image", "path": "a.png", "mode": "best"}, "mode is 'best'"),
        (
            {"type": "image_url", "image_url": {"url": "https://a.org/a.png"}},
            "url of an image is 'https://a.org/a.png'",
        ),
        ({"type": "image_url"}, "url of an image is None"),
        (
            {"type": "image_url", "image_url": {"url": uri(b"x"), "detail": "most"}},
            "detail is 'most'",
        ),
        ({"type": "image_url", "image_url": {"url": uri(b"x"), "detail": [1]}}, "detail is [1]"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}},
            "is no base64",
        ),
        ({"type": "image_url", "image_url": {"url": uri(b"abc")}}, "no format"),
    ],
)
def test_what_is_no_image_is_named(part, words, tmp_path):
    with pytest.raises(ImageError, match=r"messages\[0\]\['content'\]\[1\]: ") as error:
        with_images(user({"type": "text", "text": "a"}, part), TINY, tmp_path)
    assert words in str(error.value)

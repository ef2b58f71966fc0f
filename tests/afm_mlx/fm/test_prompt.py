"""Prompts: their text, and what a model that reads text only refuses."""

import pytest

from afm_mlx import fm
from afm_mlx.fm.prompt import prompt_text
from tests.tools.cases import each


@each("prompt, text", [("Hi", "Hi"), ("", ""), (["a", "b"], "a\nb"), (("a",), "a"), ([], "")])
def test_parts_of_a_prompt_come_on_lines_of_their_own(prompt, text):
    assert prompt_text(prompt) == text


@each("prompt", [3, None, b"a", {"a": 1}, ["a", 3], [["a"]]])
def test_other_parts_are_refused(prompt):
    with pytest.raises(fm.PromptError, match="a str, an ImageAttachment or a list"):
        prompt_text(prompt)


def test_images_are_made_of_files_and_refused_in_prompts(tmp_path):
    path = tmp_path / "image.png"
    with pytest.raises(fm.ImagePromptError, match=r"image\.png is not a file"):
        fm.ImageAttachment(path)
    path.touch()
    image = fm.ImageAttachment(path, label="photo")
    assert (image.path, image.label) == (path, "photo")
    for prompt in (image, ["Look:", image]):
        with pytest.raises(fm.ImagePromptError, match="only text can be taken"):
            prompt_text(prompt)
    assert not issubclass(fm.PromptError, fm.FoundationModelsError)
    with pytest.raises(TypeError):
        fm.Attachment()

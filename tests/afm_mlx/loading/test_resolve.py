"""A path, the embedded model's name, or a hub id of two words."""

import pytest

from afm_mlx.errors import AFMError
from afm_mlx.loading import resolve


def test_a_folder_comes_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_download", lambda name, revision: (name, revision))
    assert resolve.resolve_model("owner/name", revision="r") == ("owner/name", "r")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(resolve.resolve_model("owner/name")) == "owner/name"
    assert (resolve.resolve_model(resolve.EMBEDDED_MODEL) / "config.json").is_file()


def test_what_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "_download", lambda name, revision: pytest.fail("downloads"))
    for name in ("missing", "a/b/c", "./owner/name", "/owner", "~/name"):
        with pytest.raises(AFMError, match=f"There is no folder {name}. Give a model folder"):
            resolve.resolve_model(name)
    (tmp_path / "model.pt").touch()
    with pytest.raises(AFMError, match="is a file; a model is a folder"):
        resolve.resolve_model(tmp_path / "model.pt")

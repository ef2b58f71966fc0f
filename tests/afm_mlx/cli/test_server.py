import socket

import pytest

from afm_mlx.cli import main, server
from afm_mlx.cli.arguments import UsageError, parse
from afm_mlx.errors import AFMError
from afm_mlx.loading.resolve import resolve_model
from tests.tools.cases import each


def options(*argv):
    return server._options(parse("server", server, list(argv)))


def test_settings_come_from_flags_files_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("AFM_MLX_API_KEY", raising=False)
    monkeypatch.delenv("AFM_MLX_ADMIN_KEY", raising=False)
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nfirst\n\nsecond\n")
    monkeypatch.setenv("AFM_MLX_API_KEY", "third, first")
    given = options("--api-key", "zeroth", "--api-key-file", str(keys), "--temp", "0.5")
    assert given.api_keys == ("zeroth", "third", "first", "second")
    assert given.admin_keys == ()
    monkeypatch.setenv("AFM_MLX_ADMIN_KEY", "fourth")
    admin = options("--admin-key", "fifth", "--admin-key-file", str(keys))
    assert admin.admin_keys == ("fifth", "fourth", "first", "second")
    assert given.temperature == 0.5
    assert (given.strict, options("--strict").strict) == (False, True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"kv_memory: 2GB\nadapter_folder: [{tmp_path}]\nkv_bits: 16\nport: 0\n")
    given = options("-c", str(settings), "--port", "9000", "--decode-concurrency", "3")
    assert (given.kv_memory, given.adapter_folders) == (2 * 10**9, (tmp_path,))
    assert (given.port, given.max_batch, given.kv) == (9000, 3, "float")


@each(
    "argv, says",
    [
        (["--api-key", ""], "empty"),
        (["--api-key", "ä"], "HTTP header"),
        (["--api-key", "two words"], "HTTP header"),
        (["--api-key-file", "nowhere"], "can't be read"),
        (["--admin-key-file", "nowhere"], "--admin-key-file nowhere can't be read"),
        (["--admin-key", ""], "--admin-key is empty"),
        (["--adapter-folder", "nowhere"], "no such folder"),
        (["--kv-memory", "2 apples"], "number of bytes"),
        (["--port", "65536"], "out of range"),
        (["--allowed-origins", "*"], "--cors-origin"),
        (["--prompt-concurrency", "8"], "--prefill-step-size"),
        (["--pipeline"], "mlx.launch"),
        (["--chat-template-args", "[1]"], "JSON object"),
    ],
)
def test_settings_that_cant_be_used(argv, says):
    with pytest.raises(UsageError, match=says):
        options(*argv)


def test_what_keeps_it_from_starting_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("AFM_MLX_API_KEY", raising=False)
    monkeypatch.delenv("AFM_MLX_ADMIN_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for argv, says in (
            (["--port", port], f"error: The server can't listen on 127.0.0.1, port {port}: "),
            (["--port", port], "Address already in use"),
            (["--host", "0.0.0.0"], "needs a key"),
            (["--host", "no.such.host.invalid", "--api-key", "k"], "can't listen"),
            (["--port", "0", "--model", str(tmp_path / "none")], "no folder"),
            (["--port", "0", "--adapter", "x=nowhere"], "no adapter"),
            (["--port", "0", "--adapter", "x=a", "--adapter", "x=b"], "more than once"),
        ):
            assert main(["server", *argv]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)
            assert says in err, err


def test_several_models_have_ids_adapters_and_defaults(tmp_path):
    nano = resolve_model("afm-nano")
    owner = tmp_path / "models" / "owner"
    owner.mkdir(parents=True)
    (owner / "b").symlink_to(nano)
    (owner.parent / "a").symlink_to(nano)
    (owner.parent / "notes").mkdir()
    redact = nano / "adapters" / "redact"

    def models(*argv):
        found = server._models(parse("server", server, list(argv)))
        named = {each.name: each.source for each in found}
        assert len(named) == len(found)
        return named

    assert list(models()) == ["afm-nano"]
    found = models("--models-dir", str(owner.parent), "--adapter", f"b:tidy={redact}")
    assert list(found) == ["a", "b"]
    assert "tidy" in found["b"].adapters
    assert "tidy" not in found["a"].adapters
    both = ["--models-dir", str(owner.parent), "--model", f"{owner}/b/"]
    assert list(models(*both)) == ["b", "a"]
    argv = ["--model", "afm-nano", "--model", str(owner / "b"), "--served-model-name", "first"]
    found = models(*argv, "--adapter", f"tidy={redact}", "--adapter-path", "todo")
    assert list(found) == ["first", "b"]
    assert [each.default_adapter for each in found.values()] == ["todo", None]
    assert ["tidy" in each.adapters for each in found.values()] == [True, False]
    assert [each.drafts for each in found.values()] == [True, False]
    found = models(*argv, "--draft-model", "auto")
    assert [each.drafts for each in found.values()] == [True, True]
    with pytest.raises(UsageError, match="c:tidy is for no model; known are first, b"):
        models(*argv, "--adapter", f"c:tidy={redact}")
    with pytest.raises(UsageError, match="more often than --model"):
        models("--served-model-name", "a", "--served-model-name", "b")
    with pytest.raises(AFMError, match="has no model folders"):
        models("--models-dir", str(owner.parent / "notes"))
    with pytest.raises(AFMError, match="There is no folder"):
        models("--models-dir", str(tmp_path / "none"))


@each(
    "text, seconds",
    [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("0", None), ("5x", None)],
)
def test_durations(text, seconds):
    argv = ["--keep-alive", text]
    if seconds is None:
        with pytest.raises(UsageError, match="not a time above 0"):
            options(*argv)
    else:
        assert options(*argv).keep_alive == seconds

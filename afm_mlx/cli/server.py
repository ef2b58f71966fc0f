"""Serve models to programs that speak OpenAI's, Anthropic's or Ollama's API, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options, split_runs
from afm_mlx.cli.arguments import (
    FLAG,
    MAX_ROWS,
    Argument,
    UsageError,
    integer,
    json_object,
    number,
    positive,
    unavailable,
)
from afm_mlx.cli.signals import deferred_signals
from afm_mlx.errors import reason_of, shown
from afm_mlx.files import read_file
from afm_mlx.installation import package_problem
from afm_mlx.loading.resolve import (
    AUTO,
    EMBEDDED_MODEL,
    model_draft,
    model_folders,
    resolve_model,
)

if TYPE_CHECKING:
    from afm_mlx.ranks import Ranks
    from afm_mlx.server.hosted_model import HostedModel
    from afm_mlx.server.server_options import ServerOptions

_WHOLE_ONLY = (
    *("mask", "adapter_memory", "memory", "keep_alive", "models_dir", "prompt_cache_folder"),
)
"""Arguments that need the whole model in one process, or decide by each process's own memory and time."""
KEY_VARIABLE, ADMIN_KEY_VARIABLE = "AFM_MLX_API_KEY", "AFM_MLX_ADMIN_KEY"
MAX_KEY_FILE_BYTES = 1 << 20
_LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_SHARE = 0.75
"""Share of the machine's memory that several models may take, where MLX recommends no size."""


def nbytes(text: str) -> int:
    """Convert a number of bytes, which may have the unit KB, MB or GB."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMG]B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of bytes, such as 512MB")
    return round(float(found[1]) * _UNITS[(found[2] or "").upper()])


def duration(text: str) -> float:
    """Convert a time in seconds, which may have the unit s, m or h, to seconds above 0."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smh])?", text.strip(), re.IGNORECASE)
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[(found[2] or "s").lower()]
    if not seconds:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a time above 0, such as 90s or 5m")
    return seconds


# fmt: off
ARGUMENTS = {
    "options": [
        Argument("--model", None,
                 f"model folder, hub id, or {EMBEDDED_MODEL} (the default); may be repeated. The first loads "
                 "at the start, others when a request needs them",
                 [], action="append", metavar="MODEL"),
        Argument("--models-dir", None,
                 "folder of model folders, which are loaded when a request needs them",
                 metavar="FOLDER"),
        *(argument for argument in model_options.LOADING if argument is not model_options.MODEL),
        *model_options.ADAPTERS,
        Argument("--adapter-folder", None,
                 "folder from which requests may load adapters; may be repeated. None by default",
                 [], action="append", metavar="FOLDER"),
        Argument("--served-model-name", None,
                 "the model's id; the last part of --model by default; may be repeated, in its order",
                 [], action="append", metavar="NAME"),
        Argument("--log-level", _LEVELS, "what is logged, on standard error", "INFO"),
        Argument("--log-prompts", FLAG, "log prompts and answers, too"),
        Argument("--strict", FLAG,
                 "refuse what would have no effect: hints, unknown fields, other providers' tools. Without it "
                 "they are accepted, and named in the header x-afm-ignored"),
        unavailable("--pipeline", "start the command with mlx.launch to split the model", nargs=0),
        unavailable("--chat-template", "put chat_template.jinja into the model folder"),
        unavailable("--use-default-chat-template",
                    "remove chat_template.jinja from the model folder to use AFM's own template", nargs=0),
    ],
    "address and access": [
        Argument("--host", None, "address; one that other machines can reach needs a key", "127.0.0.1"),
        Argument("--port", integer(0, 65535), "port; 0 takes a free one", 8080),
        Argument("--unix-socket", None, "listen on a Unix socket instead of an address", metavar="PATH"),
        Argument("--api-key", None,
                 "key that requests must have; may be repeated. Other users see it in the list of processes: "
                 f"--api-key-file, or {KEY_VARIABLE} in the environment, is safer",
                 [], action="append", metavar="KEY"),
        Argument("--api-key-file", None, "file of keys, one per line", metavar="FILE"),
        Argument("--admin-key", None,
                 "key that requests must have to change adapters or to read the metrics; may be repeated. "
                 f"--admin-key-file, or {ADMIN_KEY_VARIABLE}, is safer",
                 [], action="append", metavar="KEY"),
        Argument("--admin-key-file", None, "file of admin keys, one per line", metavar="FILE"),
        Argument("--allowed-host", None, "another host name of this server that requests may use; may be "
                 "repeated",
                 [], action="append", metavar="NAME"),
        Argument("--cors-origin", None, "origin of web pages that may use the server; may be repeated",
                 [], action="append", metavar="ORIGIN"),
        unavailable("--allowed-origins", "only web pages of --cors-origin are allowed"),
    ],
    "draft tokens, which make answers faster and do not change them": model_options.SPECULATION,
    "defaults for fields that a request leaves out": [
        Argument("--temp", number(0, 2), "temperature; 0 takes the most likely token", 0.0),
        Argument("--top-p", number(0, 1), "keep the most likely tokens, up to this sum of probabilities", 1.0),
        Argument("--top-k", integer(0), "keep only this many most likely tokens; 0 keeps all", 0),
        Argument("--min-p", number(0, 1),
                 "drop tokens less likely than this share of the most likely one", 0.0),
        Argument("--max-tokens", integer(1), "maximum new tokens", 512),
        Argument("--chat-template-args", json_object, "variables for the chat template", metavar="JSON"),
    ],
    "limits": [
        Argument("--decode-concurrency", integer(1, MAX_ROWS),
                 "maximum answers generated at the same time", 16),
        Argument("--prefill-step-size", integer(1),
                 "prompt tokens that are computed at a time, at most; by default 2048; on a CPU 128, or 32 "
                 "while other answers run"),
        Argument("--max-kv-size", integer(1),
                 "maximum tokens of prompt and answer together; the model's context by default"),
        Argument("--kv-bits", integer(1, 16),
                 "8 for the checkpoint's int8 (the default where it has scales), 16 for floats",
                 choices=[8, 16]),
        Argument("--kv-memory", nbytes,
                 "memory for the KV caches of running answers, such as 2GB; further answers wait. No limit "
                 "by default",
                 metavar="BYTES"),
        Argument("--prompt-cache-bytes", nbytes,
                 "memory for keys and values of earlier prompts and answers, such as 512MB; 0 keeps none",
                 10**9,
                 metavar="BYTES"),
        Argument("--memory", nbytes,
                 "memory for the weights of all loaded models, keys and values, and the prompt cache, such as "
                 "16GB; models without requests make room for others. By default no limit for one model, and "
                 "three quarters of the machine's memory for several",
                 metavar="BYTES"),
        Argument("--keep-alive", duration,
                 "time without requests after which a model leaves memory, such as 5m; by default it stays "
                 "until another needs the room",
                 metavar="TIME"),
        Argument("--max-queue", integer(0), "maximum answers that wait; more are refused with 429", 256),
        Argument("--max-choices", integer(1), "maximum answers of one request", 128),
        Argument("--max-body", integer(1), "maximum bytes of a request", 8 << 20),
        Argument("--max-images", integer(0), "maximum images of a request", 16),
        Argument("--max-image-pixels", integer(1), "maximum width times height of an image", 32_000_000),
        Argument("--allow-remote-images", FLAG,
                 "fetch images that requests name by a public web address; without it, requests bring them"),
        Argument("--max-connections", integer(1), "maximum open connections", 1000),
        Argument("--timeout", positive(), "maximum seconds of an answer", 600.0),
        Argument("--body-timeout", positive(), "seconds in which a request's body must arrive", 30.0),
        Argument("--send-timeout", positive(), "seconds that a client may leave sent data unread", 60.0),
        Argument("--ping-interval", positive(),
                 "seconds without an event after which a stream sends a ping", 10.0),
        Argument("--idle-timeout", positive(), "seconds that a connection may stay without a request", 60.0),
        Argument("--kept-responses", integer(0), "maximum answers of /v1/responses kept for each client", 64),
        Argument("--kept-bytes", nbytes, "maximum bytes of kept answers and their conversations", 64_000_000,
                 metavar="BYTES"),
        Argument("--grace", number(0), "seconds for running answers to finish when the server stops", 30.0),
        Argument("--prompt-cache-folder", None,
                 "folder that keeps the prompt cache for later processes, too. Its readers can find out what "
                 "was asked and answered",
                 metavar="FOLDER"),
        Argument("--prompt-cache-folder-bytes", nbytes, "maximum bytes of the folder's files", 10 * 10**9,
                 metavar="BYTES"),
        unavailable("--prompt-cache-size", "--prompt-cache-bytes bounds what is kept"),
        unavailable("--prompt-concurrency", "prompts take turns, a chunk at a time: see --prefill-step-size"),
        unavailable("--kv-group-size", model_options.NO_KV_GROUPS),
        unavailable("--quantized-kv-start", model_options.NO_KV_GROUPS),
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    try:
        from afm_mlx.server.app import make_app
        from afm_mlx.server.model_registry import ModelRegistry
        from afm_mlx.server.run import address_of, bind, run
    except Exception as error:
        if not (problem := package_problem(error)):
            raise
        raise UsageError(
            f"the server needs packages of its own. {problem} (uvx --from takes the same path with its "
            "[server])."
        ) from None
    settings = _options(args)
    if settings.memory is None and (args.models_dir or len(args.model) > 1):
        settings = dataclasses.replace(settings, memory=_memory_for_models())
    model_options.check_speculation(args)

    logging.basicConfig(
        level=args.log_level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    ranks = split_runs.joined(args, args.model or [EMBEDDED_MODEL], _WHOLE_ONLY)
    if ranks is not None and len(args.model) > 1:
        raise UsageError(f"{ranks.size} ranks serve one model together; give one --model.")
    found = _models(args, ranks)
    if ranks is not None and not ranks.is_first:
        alone = dataclasses.replace(settings, draft_model=None, prompt_lookup=False)
        source = found[0].source
        assert source is not None
        served = source.load(alone)
        split_runs.follows(ranks, served.model, served.tokenizer, served.pool)
        served.close()
        return
    with split_runs.leading(ranks), deferred_signals() as stop:
        listening = bind(settings)  # a port in use is known before the model is loaded
        models = ModelRegistry(found, settings)
        first = models.default
        if args.model or not args.models_dir:
            models.load_now(first)
        others = "" if len(models.models) == 1 else f", with {len(models.models) - 1} more,"
        print(f"{first.name}{others} is served at {address_of(listening)}", flush=True)
        has_finished = run(make_app(models, settings), listening, stop)
        models.close()
        if has_finished:
            stop.clear()  # it was stopped in good order: nothing was interrupted


def _models(args: argparse.Namespace, ranks: Ranks | None = None) -> list[HostedModel]:
    """Find the models in the arguments, of which `ranks` load a part each; `AFMError` for missing ones."""
    from afm_mlx.server.hosted_model import HostedModel
    from afm_mlx.server.served_model import ModelSource

    given: list[str | Path] = list(args.model)
    if args.models_dir is not None:
        named = {os.path.abspath(resolve_model(each)) for each in given}
        folders = model_folders(args.models_dir)
        given += [each for each in folders if os.path.abspath(each) not in named]
    given = given or [EMBEDDED_MODEL]
    if len(args.served_model_name) > len(given):
        raise UsageError(
            "--served-model-name is given more often than --model; leave the last out."
        )
    adapters = model_options.named_adapters(args.adapter)
    sources = []
    for index, path in enumerate(given):
        name = (args.served_model_name[index:] or [None])[0]
        name = ModelSource.of(path, name=name).name
        own = {
            each.removeprefix(f"{name}:"): adapters.pop(each)
            for each in list(adapters)
            if each.startswith(f"{name}:") or (index == 0 and ":" not in each)
        }
        draft = args.draft_model
        sources.append(
            ModelSource.of(
                path,
                name=name,
                adapter_path=args.adapter_path if index == 0 else None,
                mask=args.mask if index == 0 else None,
                adapters=own,
                adapter_memory=args.adapter_memory,
                force_adapters=args.force,
                kv_bits=args.kv_bits,
                drafts=index == 0
                or (draft == AUTO and model_draft(resolve_model(path)) is not None),
                load_options={
                    "trust_remote_code": args.trust_remote_code,
                    "activation_bits": args.activation_bits,
                    "ranks": ranks,
                },
            )
        )
    if adapters:
        raise UsageError(
            f"--adapter {next(iter(adapters))} is for no model; known are "
            f"{', '.join(source.name for source in sources)}."
        )
    return [HostedModel(source) for source in sources]


def _memory_for_models() -> int:
    """Return the bytes that several models may take by default."""
    import mlx.core as mx

    from afm_mlx.measure.machine import machine_memory

    info = mx.device_info() if mx.metal.is_available() else {}
    recommended = info.get("max_recommended_working_set_size")
    return int(recommended or _SHARE * machine_memory())


def _options(args: argparse.Namespace) -> ServerOptions:
    from afm_mlx.server.server_options import ServerOptions

    names = [field.name for field in dataclasses.fields(ServerOptions)]
    values: dict[str, Any] = {name: getattr(args, name) for name in names if hasattr(args, name)}
    for path in args.adapter_folder:
        if not os.path.isdir(os.path.expanduser(path)):
            raise UsageError(f"--adapter-folder is {path}, and there is no such folder.")
    values |= {
        "unix_socket": _path(args.unix_socket),
        "api_keys": _keys(args, "api", KEY_VARIABLE),
        "admin_keys": _keys(args, "admin", ADMIN_KEY_VARIABLE),
        "allowed_hosts": tuple(args.allowed_host),
        "cors_origins": tuple(args.cors_origin),
        "adapter_folders": tuple(_path(path) for path in args.adapter_folder),
        "temperature": args.temp,
        "prompt_cache_folder": _path(args.prompt_cache_folder),
        "chat_template_args": args.chat_template_args or {},
        "max_batch": args.decode_concurrency,
        "kv": "float" if args.kv_bits == 16 else "int8",
    }
    return ServerOptions(**values)


def _path(path: str | None) -> Path | None:
    return None if path is None else Path(os.path.expanduser(path))


def _keys(args: argparse.Namespace, kind: str, variable: str) -> tuple[str, ...]:
    """Collect the distinct keys of flags, file and environment; `kind` is "api" or "admin"."""
    flag, given = f"--{kind}-key", getattr(args, f"{kind}_key")
    path = getattr(args, f"{kind}_key_file")
    keys = [*given, *os.environ.get(variable, "").split(",")]
    if path is not None:
        try:
            lines = read_file(path, MAX_KEY_FILE_BYTES, pipes=True).decode("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"{flag}-file {path} can't be read ({reason_of(error)}).") from None
        of_file = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not of_file:
            raise UsageError(f"{flag}-file {path} has no key.")
        keys += of_file
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if "" in (key.strip() for key in given):
        raise UsageError(f"{flag} is empty; give a key.")
    for key in found:
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise UsageError(
                f"the key {shown(key[:3] + '...')} has characters that no HTTP header takes; use letters, "
                "digits and signs of ASCII."
            )
    return found

"""All settings of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server; `afm-mlx server --help` describes the options of the same names.

    Args:
        port: 0 takes a free one.
        unix_socket: path of a Unix socket to listen on, instead of an address.
        api_keys: keys of clients, each key a client; empty for a server without keys.
        admin_keys: keys that also allow changing adapters and reading metrics. A server without keys of either
            kind allows them to everybody.
        allowed_hosts: allowed values of the Host header, besides this machine's names.
        adapter_folders: folders from which requests may load adapters.
        max_batch: maximum number of rows that decode together.
        prefill_step_size: maximum number of prompt tokens per step; pass None for `Engine`'s default.
        max_kv_size: maximum number of tokens of prompt and answer; pass None for the model's context.
        kv: "int8" or "float" storage of keys and values.
        draft_model: folder or hub id of a draft model; "auto" for the one that comes with the model; pass None
            for none.
        num_draft_tokens: draft tokens per step; pass None to adapt to their acceptance.
        prompt_lookup: True to draft the tokens that followed an earlier occurrence of the last tokens.
        kv_memory: maximum bytes of the KV caches of running answers; pass None for no limit.
        memory: maximum bytes of all models' weights together with `prompt_cache_bytes` and `kv_memory` (without
            it, what KV caches take); pass None for no limit.
        keep_alive: seconds without a request after which a model is evicted; pass None to keep it.
        prompt_cache_bytes: maximum bytes of the prefix cache in memory; 0 for no prefix cache.
        max_share: maximum share of the waiting and running answers for one key.
        max_choices: maximum number of answers of one request: its prompts times `n`.
        max_images: maximum number of images of one request.
        max_image_pixels: maximum width times height of an image; larger ones are refused undecoded.
        allow_remote_images: True to fetch images from public addresses on the web.
        body_timeout, timeout, send_timeout: maximum seconds in which a body must arrive, of an answer, and for
            which a client may leave an event unread.
        kept_responses: maximum number of responses of /v1/responses kept in memory for each client.
        grace: maximum seconds for running answers to finish when the server stops.
        strict: True to refuse fields that would have no effect, see `field_rules.py`.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    unix_socket: Path | None = None
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    adapter_folders: tuple[Path, ...] = ()
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    max_batch: int = 16
    prefill_step_size: int | None = None
    max_kv_size: int | None = None
    kv: str = "int8"
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    prompt_lookup: bool = False
    kv_memory: int | None = None
    memory: int | None = None
    keep_alive: float | None = None
    prompt_cache_bytes: int = 10**9
    prompt_cache_folder: Path | None = None
    prompt_cache_folder_bytes: int = 10 * 10**9
    max_queue: int = 256
    max_share: float = 0.5
    max_choices: int = 128
    max_body: int = 8 << 20
    max_images: int = 16
    max_image_pixels: int = 32_000_000
    allow_remote_images: bool = False
    body_timeout: float = 30
    timeout: float = 600
    send_timeout: float = 60
    ping_interval: float = 10
    idle_timeout: float = 60
    max_connections: int = 1000
    kept_responses: int = 64
    kept_bytes: int = 64_000_000
    grace: float = 30
    strict: bool = False
    log_prompts: bool = False

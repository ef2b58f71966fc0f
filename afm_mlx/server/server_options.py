"""Every setting of the server, in one place: the command line and tests fill it, the rest reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Args:
        host, port: address to listen at; port 0 takes a free one.
        unix_socket: path of a Unix socket to listen at, in place of an address.
        api_keys: keys of clients, each a client of its own; none for a server that asks for no key.
        admin_keys: keys of those who may change adapters and read the metrics, too. With no key of either kind,
            everybody may who reaches the server.
        allowed_hosts: names that requests may have as their Host, besides those of this machine.
        cors_origins: origins of web pages that may use the server.
        adapter_folders: folders below which adapters may be loaded by a request.
        max_tokens: new tokens of a request that does not say.
        temperature, top_p, top_k, min_p: sampling of a request that does not say.
        chat_template_args: variables for the chat template.
        max_batch: rows that decode together.
        prefill_step_size: prompt tokens per step at most; None for what `Engine` takes.
        max_kv_size: tokens that prompt and answer may have together; None for the model's context.
        kv: "int8" or "float" storage of keys and values.
        draft_model: folder or hub id of a draft model, whose guesses the model checks; "auto" for the one that
            comes with the model, None for none.
        num_draft_tokens: guesses at a time; None for as many as pay.
        prompt_lookup: whether to guess what followed the last tokens where they stood before.
        kv_memory: bytes that keys and values of running answers may take; None for no limit.
        prompt_cache_bytes: bytes of keys and values that are kept of earlier prompts and answers; 0 for none.
        prompt_cache_folder: folder in which they are kept for later processes, too; None for none.
        prompt_cache_folder_bytes: bytes of its files at most.
        max_queue: answers that may wait for the batch; more are refused.
        max_share: answers that one client may have waiting and running, as a share of all; only with keys.
        max_choices: answers of one request at most: its prompts, times `n`.
        max_body: bytes of a request's body at most.
        body_timeout: seconds in which a body has to come.
        timeout: seconds in which an answer has to be given; it is ended with an error then.
        send_timeout: seconds that a client may leave what it was sent unread.
        ping_interval: seconds without an event after which a stream has a ping.
        idle_timeout: seconds that a connection may stay open without a request.
        max_connections: open connections at most; the one that was idle for longest makes room.
        kept_responses: responses of /v1/responses that are kept in memory for each client at most.
        kept_bytes: bytes of all responses that are kept, with their conversations, at most.
        grace: seconds that running answers have when the server is told to stop.
        strict: refuse what would be taken and have no effect, see `field_rules.py`.
        log_prompts: whether the log shows prompts and answers.
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
    prompt_cache_bytes: int = 10**9
    prompt_cache_folder: Path | None = None
    prompt_cache_folder_bytes: int = 10 * 10**9
    max_queue: int = 256
    max_share: float = 0.5
    max_choices: int = 128
    max_body: int = 8 << 20
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

"""The images of a request: read within bounds, in a thread, and marked in the messages.

    images = lease.images()  # before the model is loaded, too
    text = images.mark("data:image/png;base64,...", "messages[0].content[1].image_url", "low")
    prompt = served.encode_chat([{"role": "user", "content": text}], images=images.chat)

Only a server that is started with `--allow-remote-images` fetches images. It connects to addresses that it has
looked up and checked, and to no others: other machines' public ones.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from afm_mlx.errors import AFMError, shown
from afm_mlx.server.replies import ApiError, bad_request
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.vision.message_images import DETAILS, data_uri_content
from afm_mlx.vision.prompt_image import PromptImage, read_image
from afm_mlx.vision_config import VisionConfig

HELD_BYTES = 1 << 30
"""Maximum bytes of the fitted images of all requests that wait or run, and of kept responses."""
FETCH_SECONDS, REDIRECTS = 10.0, 3
"""Limits on fetching one image."""
_WEB = re.compile(r"https?://", re.IGNORECASE)


class ImageMemory:
    """Counts the bytes of all images in memory, and refuses what exceeds `most`; used by several threads.

    Attributes:
        decoding: bounds the images that are decoded at a time, each of which may take hundreds of megabytes.
    """

    def __init__(self, most: int = HELD_BYTES):
        self.decoding = threading.Semaphore(max(1, (os.cpu_count() or 1) // 4))
        self._left = most
        self._lock = threading.RLock()  # an image may be freed while the lock is held

    def hold(self, image: PromptImage) -> None:
        """Count an image until it is freed; raise a 429 if there is no room for it."""
        size = image.tiles.nbytes
        with self._lock:
            if size > self._left:
                raise ApiError(
                    429,
                    "The images of running requests fill the memory for images. Try again later, or send "
                    "fewer at a time.",
                    code="queue_full",
                    retry_after=5,
                )
            self._left -= size
        weakref.finalize(image, self._release, size)

    def _release(self, size: int) -> None:
        with self._lock:
            self._left += size


class RequestImages:
    """The images of one request.

    Args:
        config: the model's; pass None for a model that reads text only.
        context_size: number of tokens that the prompt may have.
        memory: what the server's images share.

    Attributes:
        chat: the images, in the form that encoding a chat takes.
        images: the images that were read, and the ones of `carried` messages.
    """

    def __init__(
        self,
        config: VisionConfig | None,
        context_size: int,
        options: ServerOptions,
        memory: ImageMemory,
    ):
        self.config, self.chat = config, ChatImages()
        self.images: list[PromptImage] = []
        self._context_size, self._options, self._memory = context_size, options, memory

    def mark(self, source: str, place: str, detail: str | None = None) -> str:
        """Read an image, and return the text that stands for it in a message; slow for large images.

        Args:
            source: a data URI, or a web address if the server fetches images.
            place: where the image is in the body, for errors.
            detail: OpenAI's; pass None for "auto".

        Raises:
            ApiError: 400 about `place` for an image that can't be used, or is one too many; 429 if the images
                of all requests exceed `HELD_BYTES`.
        """
        assert self.config is not None
        if len(self.images) >= self._options.max_images:
            raise bad_request(
                f"{place} is one image too many; this server takes {self._options.max_images} of one request. "
                "Leave older ones out, or start the server with another --max-images.",
                place,
                "too_many_images",
            )
        is_remote = _WEB.match(source) is not None
        try:
            content = self._fetched(source, place) if is_remote else data_uri_content(source)
            mode, pixels = DETAILS[detail or "auto"], self._options.max_image_pixels
            with self._memory.decoding:
                image = read_image(content, self.config, mode, pixels)
        except AFMError as error:
            raise bad_request(f"{place}: {error}", place, "invalid_image") from error
        tokens = sum(each.tokens for each in (*self.images, image))
        if tokens > self._context_size:
            raise bad_request(
                f"The images up to {place} have {tokens} tokens, and the context holds "
                f"{self._context_size}. Send fewer, or smaller ones.",
                place,
                "context_length_exceeded",
            )
        self._memory.hold(image)
        self.images.append(image)
        return self.chat.mark(image)

    def mark_base64(self, data: str, place: str) -> str:
        """Read an image whose bytes are in base64, as `mark` does."""
        is_uri = data[:5].lower() == "data:"  # which some programs send all the same
        return self.mark(data if is_uri else f"data:;base64,{data}", place)

    def carried(
        self, messages: Sequence[dict[str, Any]], earlier: RequestImages
    ) -> list[dict[str, Any]]:
        """Return the messages of an earlier response with marks of this request; add its images to this one's.

        Raises:
            ApiError: 400 if the images were read for another model.
        """
        if not earlier.images:
            return list(messages)
        if earlier.config != self.config:
            raise bad_request(
                "previous_response_id is of a conversation with images, and they were read for another model. "
                "Continue it with that model, or send the whole conversation as input.",
                "previous_response_id",
            )
        self.images += earlier.images
        carried = []
        for message in messages:
            text = message["content"]
            for image in earlier.chat.find(text):
                text = text.replace(earlier.chat.mark(image), self.chat.mark(image))
            carried.append({**message, "content": text})
        return carried

    def _fetched(self, url: str, place: str) -> bytes:
        if not self._options.allow_remote_images:
            raise bad_request(
                f"{place} is a web address, and this server fetches no images. Send the image as a data URI in "
                "base64, or start the server with --allow-remote-images.",
                place,
                "remote_images_off",
            )
        try:
            return asyncio.run(fetched(url, self._options.max_body))
        except (AFMError, httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            why = str(error) if isinstance(error, AFMError) else "it could not be reached"
            raise bad_request(
                f"{place} can't be fetched: {why}. Send the image as a data URI in base64.",
                place,
                "image_not_fetched",
            ) from error


# -- remote images


async def fetched(url: str, most: int) -> bytes:
    """Fetch up to `most` bytes from a public address on the web.

    Raises:
        AFMError: for anything else than a public http(s) address that answers with 200 in time.
        httpx2.HTTPError, OSError, ValueError: if it can't be reached, or is no address.
    """
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            for _ in range(REDIRECTS + 1):
                found = await _requested(httpx2.URL(url), most)
                if isinstance(found, bytes):
                    return found
                url = found
    except TimeoutError:
        raise AFMError(f"it took longer than {FETCH_SECONDS:g} s") from None
    raise AFMError(f"it has more than {REDIRECTS} redirects")


async def _requested(url: httpx2.URL, most: int) -> bytes | str:
    """Return the content of a URL, or the URL that it redirects to."""
    if url.scheme not in ("http", "https") or not url.host or (url.port or 80) >= 1 << 16:
        raise AFMError(f"{shown(str(url))} is no http or https address")
    host = url.raw_host.decode("ascii")
    address = await public_address(host)
    # The name is not looked up again: a second answer could be another address (DNS rebinding).
    request = httpx2.Request(
        "GET",
        url.copy_with(host=address),
        headers={
            "Host": url.netloc.decode("ascii").rpartition("@")[2],
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "User-Agent": "afm-mlx",
        },
        extensions={"sni_hostname": host},
    )
    verify = httpx2.create_ssl_context() if url.scheme == "https" else False
    # Without the environment's proxies, which would connect to addresses of their choice.
    async with httpx2.AsyncClient(trust_env=False, verify=verify) as client:
        response = await client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                return str(url.join(response.headers["location"]))
            if response.status_code != 200:
                raise AFMError(f"its server answers with the status {response.status_code}")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > most:
                    raise AFMError(f"it has more than {most} bytes")
            return bytes(content)
        finally:
            await response.aclose()


_LOOKUPS = ThreadPoolExecutor(8, "server-lookups")
"""Threads that look names up. They are not the event loop's own, for which `asyncio.run` waits however long."""


async def public_address(host: str) -> str:
    """Return an address of a host; raise `AFMError` unless all are public, and none is this machine's."""
    found = await asyncio.get_running_loop().run_in_executor(
        _LOOKUPS, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )
    addresses = [str(entry[4][0]) for entry in found]
    if not all(is_public(address) and not is_own(address) for address in addresses):
        raise AFMError("its address is not a public one")
    return addresses[0]


_IPV6_UNICAST = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses of the internet; most ways to an IPv4 address, such as ::ffff:0:0/96, are outside."""
_INSIDE_CLOUDS = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "168.63.129.16/32")]
"""Oracle's and Azure's metadata services, which `ipaddress` of some Python versions counts as public."""


def is_public(address: str) -> bool:
    """True if an IP address is on the public internet, and no way to an IPv4 address, which may be inside."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found not in _IPV6_UNICAST or found.sixtofour or found.teredo:
            return False
    elif any(found in network for network in _INSIDE_CLOUDS):
        return False
    return found.is_global and not found.is_multicast


def is_own(address: str) -> bool:
    """True if an IP address is of this machine, which even a public one may be."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True

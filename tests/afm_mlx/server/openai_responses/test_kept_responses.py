"""What is kept of earlier responses, and for whom."""

from afm_mlx.server.request_fields import MessageItem
from afm_mlx.server.responses_api import KeptResponse, KeptResponses


def response(text):
    item = MessageItem(role="assistant", content=text)
    return KeptResponse(text.encode(), [{"role": "user", "content": text}], {f"msg {text}": item})


def test_the_last_ones_of_each_client_are_kept_and_only_for_it():
    kept = KeptResponses(2, 1 << 20)
    for client in ("ann", "ben"):
        for number in range(3):
            kept.keep(client, f"{client}-{number}", response(f"{client} {number}"))
            kept.get(client, f"{client}-0")  # used last, so another one goes
    assert [kept.get("ann", f"ann-{n}") is not None for n in range(3)] == [True, False, True]
    assert kept.get("ben", "ben-2").body == b"ben 2"
    assert kept.find_item("ben", "msg ben 2").content == "ben 2"
    assert kept.find_item("ben", "msg ann 2") is kept.find_item("ann", "msg ann 1") is None
    assert kept.get("ben", "ann-2") is None
    assert not kept.remove("ben", "ann-2")
    assert kept.find_item("ann", "msg ann 2") is not None
    assert kept.remove("ann", "ann-2")
    assert kept.find_item("ann", "msg ann 2") is None
    assert not kept.remove("ann", "ann-2")


def test_bytes_are_bounded():
    kept = KeptResponses(1000, 10_000)
    for number in range(100):
        kept.keep("", str(number), response("x" * 1000))
    assert 2 <= sum(kept.get("", str(number)) is not None for number in range(100)) <= 4
    assert kept.get("", "99") is not None
    kept.keep("", "huge", response("x" * 20_000))
    assert kept.get("", "huge") is None
    assert not KeptResponses(0, 1000).is_on

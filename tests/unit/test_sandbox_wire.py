from __future__ import annotations

import json
import random

from mappa_graph.sandboxes.wire import pack, sign, unpack

KEY = b"key"


def _frames(header: object, parent: object = None, content: object = None, key: bytes = KEY) -> list[bytes]:
    parts = [json.dumps(p).encode() for p in (header, {} if parent is None else parent, {}, {} if content is None else content)]
    return [b"topic", b"<IDS|MSG>", sign(key, parts), *parts]


def test_a_signed_message_is_read() -> None:
    message = unpack(KEY, _frames({"msg_type": "stream"}, {"msg_id": "7"}, {"text": "x"}))
    assert message is not None
    assert (message.kind, message.parent, message.content) == ("stream", "7", {"text": "x"})


def test_a_request_is_signed_the_way_jupyter_does_it() -> None:
    from jupyter_client.session import Session

    identifier, frames = pack(KEY, "execute_request", {"code": "1"}, "s")
    session = Session(key=KEY)
    _, rest = session.feed_identities(frames)
    message = session.deserialize(rest)
    assert message["msg_id"] == identifier
    assert message["content"] == {"code": "1"}


def test_a_message_signed_with_another_key_is_dropped() -> None:
    assert unpack(KEY, _frames({"msg_type": "stream"}, key=b"other")) is None


def test_anything_else_is_dropped_without_an_exception() -> None:
    rng = random.Random(5)
    headers: tuple[object, ...] = (None, 3, [], "x", {}, {"msg_type": 5}, {"msg_type": None})
    for header in headers:
        assert unpack(KEY, _frames(header)) is None
    assert unpack(KEY, _frames({"msg_type": "a"}, parent=[1])) is None
    assert unpack(KEY, _frames({"msg_type": "a"}, parent={"msg_id": 4})) is None
    assert unpack(KEY, _frames({"msg_type": "a"}, content=[1])) is None
    deep = b"[" * 200_000 + b"]" * 200_000
    assert unpack(KEY, [b"<IDS|MSG>", sign(KEY, [deep] * 4), deep, deep, deep, deep]) is None
    for _ in range(200):
        assert unpack(KEY, [rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(0, 8))]) is None

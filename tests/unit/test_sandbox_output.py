from __future__ import annotations

import random

from mappa_graph.sandboxes.limits import Limits
from mappa_graph.sandboxes.output import HeadTail, clean, shorten
from mappa_graph.sandboxes.recorder import Recorder
from mappa_graph.sandboxes.wire import Message


def test_escapes_and_controls_are_removed() -> None:
    assert clean("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1bP1;2|q\x1b\\y\x00\x08\x7f") == "red xy"
    assert clean("\x1b[2J\x1b[Hcleared") == "cleared"
    assert clean("tab\tand\nline") == "tab\tand\nline"


def test_no_escape_survives_random_bytes() -> None:
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice(["\x1b", "[", "]", "m", "\x9b", "\x07", "\\", "1", ";", "a", "\r", "\n", "\udc80"]) for _ in range(60))
        cleaned = clean(text)
        assert not set(cleaned) & {"\x1b", "\x9b", "\x07", "\r"}
        cleaned.encode()


def test_of_a_redrawn_line_the_last_drawing_stays() -> None:
    assert clean("10%\r50%\r100%\nnext\r\nlast\r") == "100%\nnext\nlast"


def test_cleaning_a_long_line_of_hostile_text_is_not_quadratic() -> None:
    assert clean("\x1b[" + "1;" * 500_000) == ""
    assert clean("\x1b[" * 500_000) == ""
    assert len(clean("a\r" * 500_000)) == 1


def test_head_and_tail_survive_any_chunking() -> None:
    text = "".join(chr(97 + i % 26) for i in range(10_000))
    rng = random.Random(3)
    for _ in range(20):
        kept, rest = HeadTail(1000), text
        while rest:
            size = rng.randint(1, 700)
            kept.write(rest[:size])
            rest = rest[size:]
        assert kept.truncated
        assert kept.text() == f"{text[:500]}\n[... 9000 characters cut ...]\n{text[-500:]}"
        assert kept.tail_size < 1200


def test_text_within_the_limit_is_whole() -> None:
    kept = HeadTail(10)
    for part in ("abc", "defg", "hij"):
        kept.write(part)
    assert kept.text() == "abcdefghij"
    assert not kept.truncated
    assert shorten("x" * 11, 10).startswith("xxxxx\n[... 1 ")


def test_a_message_with_fields_of_any_type_does_not_break_the_record() -> None:
    recorder = Recorder(Limits(output_chars=100))
    junk: list[object] = [None, 3, "x", [], {}, {"text/plain": 5}, {"image/png": "%%%"}, {"text/html": 1}]
    for kind in ("stream", "execute_result", "display_data", "error", "nonsense", "status"):
        for value in junk:
            for key in ("name", "text", "data", "ename", "evalue", "traceback"):
                recorder.feed(Message(kind, "", {key: value, "name": value}))
    assert recorder.result is None
    assert recorder.error is not None
    assert recorder.displays == []


def test_shown_images_and_html_are_collected_in_order() -> None:
    recorder = Recorder(Limits())
    recorder.feed(Message("display_data", "", {"data": {"text/plain": "<fig>", "image/png": "aGk="}}))
    recorder.feed(Message("display_data", "", {"data": {"text/html": "<b>x</b>"}}))
    assert recorder.displays == [("png", b"hi"), ("html", b"<b>x</b>")]
    assert recorder.streams["stdout"].text() == "<fig>\n"


def test_a_flood_is_noticed_before_it_is_kept() -> None:
    recorder = Recorder(Limits(output_mb=1, output_chars=1000))
    for _ in range(1100):
        recorder.feed(Message("stream", "", {"name": "stdout", "text": "x" * 1000}))
    assert recorder.flooded
    assert len(recorder.streams["stdout"].text()) < 1100

"""`mappa-graph import` end to end: chats and broken files in, coached after the fact, exact tokens where a gateway has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from langchain_core.tracers.langchain import LangChainTracer
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langsmith import Client
from typer.testing import CliRunner

from mappa_graph import TraceStore
from mappa_graph.cli import app as all_commands
from mappa_graph.commands import importing
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.importer import import_traces
from mappa_graph.exchange.keeper import Keeper
from mappa_graph.exchange.langsmith import LangSmithSource
from mappa_graph.exchange.spans import ImportProblem
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.engine import Request
from mappa_graph.record import EpisodeTrace, Verdict
from mappa_graph.trainers.batch import samples_from_trace
from tests.fakes.engine import ScriptedEngine
from tests.fakes.langsmith import LangSmith
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.shapes import run_live, tools

commands = typer.Typer()
importing.register(commands)


def command(*words: str, code: int = 0) -> str:
    said = CliRunner(env={"COLUMNS": "200"}).invoke(commands, list(words))
    if said.exception is not None and not isinstance(said.exception, SystemExit):
        raise said.exception
    assert said.exit_code == code, said.output
    return said.output


def stored(run: Path) -> list[EpisodeTrace]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return list(store.traces())


def chat(number: int) -> dict[str, Any]:
    """A question, a tool call and its answer, the answer, and a second turn."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": number, "b": 2})}}
    return {
        "id": f"chat {number}",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{number} + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": str(number + 2)},
            {"role": "assistant", "content": f"It is {number + 2}."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Sure."},
        ],
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_chats_become_actions_with_their_tools_and_are_coached_after_the_fact(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = command("import", str(write(tmp_path / "chats.jsonl", [chat(1), chat(2)])), "--into", str(run), "--environment", "support")
    assert "2 traces in" in said and "6 actions, 2 executions" in said
    assert "0 actions have the gateway's tokens; 6 are text only" in said
    first, _ = stored(run)
    assert (first.episode.id, first.episode.task, first.episode.environment, first.episode.status) == (
        "chat 1",
        "1 + 2?",
        "support",
        "done",
    )
    assert [(a.agent, a.output, len(a.messages), len(a.executions)) for a in first.actions] == [
        ("assistant", "", 2, 1), ("assistant", "It is 3.", 4, 0), ("assistant", "Sure.", 6, 0),
    ]  # fmt: skip
    (execution,) = first.actions[0].executions
    assert (execution.name, execution.code, execution.result, execution.tool_call_id) == ("add", '{"a": 1, "b": 2}', "3", "c1")
    assert list(first.actions[1].messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": chat(1)["messages"][2]["tool_calls"]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert first.edges == ((0, 1), (1, 2))
    for when in ("completed", "episode"):
        said_ = CliRunner().invoke(all_commands, ["coach", str(run), "--coach", "evidence", "--set", f"coach.when={when}", "--again"])
        assert said_.exit_code == 0 and "6 scored" in said_.output, said_.output
    assert all(len(t.verdicts) == 3 and all(v.score is not None for v in t.verdicts.values()) for t in stored(run))
    # Text alone is never trained on by the on-policy trainer.
    samples, left_out = samples_from_trace(stored(run)[0], gamma=0.9)
    assert samples == [] and sum(left_out.values()) == 3


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"prompt": "hi", "completion": "ho"},
        {"prompt": [{"role": "user", "content": "hi"}], "response": [{"role": "assistant", "content": "ho"}]},
        {"messages": json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}]},
    ],
)
def test_other_spellings_of_a_chat(row: dict[str, Any], tmp_path: Path) -> None:
    done = import_traces(FileSource(write(tmp_path / "c.jsonl", [row, row]), tmp_path, agent="bob"), tmp_path)
    (trace,) = stored(tmp_path)
    assert [(a.agent, a.output, list(a.messages), a.trainable) for a in trace.actions] == [
        ("bob", "ho", [{"role": "user", "content": "hi"}], True)
    ]
    # A row without an id is known by what it says: the second is the first again.
    assert done.traces == 1 and done.problems["trace that came twice"] == 1
    assert import_traces(FileSource(tmp_path / "c.jsonl", tmp_path, agent="bob"), tmp_path, again=True).traces == 0


def test_bad_lines_are_counted_and_named_and_end_a_strict_import_only(tmp_path: Path) -> None:
    good, other = json.dumps(chat(1)).encode(), json.dumps(chat(2)).encode()
    odd_chat = [{"role": "user", "content": "caf\xe9"}, {"role": "assistant", "content": "x"}]
    odd = json.dumps({"id": "odd", "messages": odd_chat}, ensure_ascii=False)
    huge = json.dumps({"id": "huge", "messages": [{"role": "user", "content": "y" * 3_000_000}, {"role": "assistant", "content": "x"}]})
    lines = [
        good, b"", b"nonsense", odd.encode("latin-1"), b'["no", "object"]',
        b'{"id": "mute", "messages": [{"role": "user", "content": "hi"}]}',
        b'{"id": "empty", "messages": []}', huge.encode(), other, good[: len(good) // 2],
    ]  # fmt: skip
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    said = command("import", str(tmp_path / "bad.jsonl"), "--into", str(tmp_path / "run"))
    assert "4 traces in" in said and "bad.jsonl, byte" in said
    traces = {t.episode.id: t for t in stored(tmp_path / "run")}
    assert set(traces) == {"chat 1", "chat 2", "odd", "huge"}
    assert traces["odd"].actions[0].messages[0]["content"] == "caf�"
    cut = traces["huge"].actions[0].messages[0]["content"]
    assert 1_000_000 <= len(cut) < 1_000_100 and "2000000 characters cut" in cut
    done = import_traces(FileSource(tmp_path / "bad.jsonl", tmp_path), tmp_path / "again")
    assert done.problems == {
        "line that is not JSON": 2, "text that is not UTF-8 (read as far as it goes)": 1, "row that is no object": 1,
        "chat without an answer": 1, "chat without messages": 1,
    }  # fmt: skip
    with pytest.raises(ImportProblem, match="byte"):
        import_traces(FileSource(tmp_path / "bad.jsonl", tmp_path), tmp_path / "strict", strict=True)
    assert [t.episode.id for t in stored(tmp_path / "strict")] in ([], ["chat 1"])


def test_an_appended_file_is_read_from_where_it_ended_and_a_changed_one_anew(tmp_path: Path) -> None:
    path, run = write(tmp_path / "chats.jsonl", [chat(i) for i in range(200)]), tmp_path / "run"
    assert import_traces(FileSource(path, run), run).traces == 200
    with path.open("a") as file:
        file.write(json.dumps(chat(200)) + "\n")
    grown = import_traces(FileSource(path, run), run)
    assert grown.traces == 1 and grown.known < 100
    write(path, [chat(i) for i in range(300, 310)])
    assert import_traces(FileSource(path, run), run).traces == 10
    assert len(stored(run)) == 211


@pytest.mark.parametrize(("edited", "again"), [(1, "5 + 3?"), (3, "9"), (5, "Are you sure?"), (0, "Be blunt.")])
def test_a_chat_whose_middle_was_edited_replaces_the_first_and_takes_away_the_scores_of_what_it_changed(
    edited: int, again: str, tmp_path: Path
) -> None:
    rows, run = [chat(i) for i in range(150)], tmp_path / "run"
    path = write(tmp_path / "chats.jsonl", rows)  # the edited chat lies in the middle of a file that is read by places
    command("import", str(path), "--into", str(run))
    with TraceStore(run / "trace.db") as store:
        for trace in store.traces():
            store.add_verdicts(trace.episode.id, {a.id: Verdict(8.0) for a in trace.actions})
    rows[70]["messages"][edited]["content"] = again
    write(path, rows)
    said = command("import", str(path), "--into", str(run))
    assert "0 traces in, 1 updated, 149 known" in said
    changed = sum(place > edited for place in (2, 4, 6)) + (edited == 3)  # actions that saw it, and the one whose tool answered so
    assert f"{changed} verdicts were taken away" in said and f"mappa-graph coach {run}" in said
    traces = {t.episode.id: t for t in stored(run)}
    new = traces.pop("chat 70")
    assert new.actions[-1].messages[edited]["content"] == again and len(traces) == 149
    assert len(new.verdicts) == 3 - changed and all(len(t.verdicts) == 3 for t in traces.values())
    assert "0 traces in, 0 updated" in command("import", str(path), "--into", str(run), "--again")
    rows[70] = chat(70) | {"messages": chat(70)["messages"][:3]}
    said = command("import", str(write(path, rows)), "--into", str(run))
    assert "1 updated" in said and len({t.episode.id: t for t in stored(run)}["chat 70"].actions) == 1


def test_scores_of_changed_words_go_though_the_import_that_brought_them_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, row = tmp_path / "run", chat(1)
    path = write(tmp_path / "c.jsonl", [row])
    command("import", str(path), "--into", str(run))
    with TraceStore(run / "trace.db") as store:
        (trace,) = store.traces()
        store.add_verdicts(trace.episode.id, {a.id: Verdict(8.0) for a in trace.actions})
    row["messages"][1]["content"] = "5 + 3?"
    write(path, [row])
    with monkeypatch.context() as cut:
        cut.setattr(Keeper, "_unscore", lambda self, traces: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_traces(FileSource(path, run), run)
    command("import", str(path), "--into", str(run))
    (trace,) = stored(run)
    assert trace.actions[0].messages[1]["content"] == "5 + 3?" and not trace.verdicts


def test_scores_stay_where_a_trace_comes_again_with_the_same_words(tmp_path: Path) -> None:
    run, row = tmp_path / "run", chat(1)
    write(tmp_path / "c.jsonl", [row])
    command("import", str(tmp_path / "c.jsonl"), "--into", str(run), "--redact", "all")
    with TraceStore(run / "trace.db") as store:
        (trace,) = store.traces()
        store.add_verdicts(trace.episode.id, {a.id: Verdict(8.0) for a in trace.actions})
    row["messages"] += [{"role": "user", "content": "And 9 + 9, ann@example.org?"}, {"role": "assistant", "content": "18."}]
    row["score"] = 1
    said = command("import", str(write(tmp_path / "c.jsonl", [row])), "--into", str(run), "--redact", "all")
    assert "1 updated" in said and "taken away" not in said
    (trace,) = stored(run)
    assert [trace.verdicts.get(a.id) for a in trace.actions] == [Verdict(8.0)] * 3 + [None]


def test_one_trace_that_can_not_be_stored_does_not_take_its_batch_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(payload: Any) -> Any:
        if "3 + 2?" in json.dumps(payload) and "transitions" in payload:
            raise ValueError("the hook fails on this one")
        return payload

    done = import_traces(FileSource(write(tmp_path / "c.jsonl", [chat(i) for i in range(8)]), tmp_path), tmp_path, redact=hook)
    assert (done.traces, done.failed) == (7, 1) and done.problems["trace that can't be stored: ValueError"] == 1
    assert [t.episode.id for t in stored(tmp_path)] == [f"chat {i}" for i in range(8) if i != 3]


def test_an_import_that_is_killed_at_any_moment_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [chat(i) for i in range(800)])
    run = tmp_path / "run"
    program = (
        "import sys; from mappa_graph.exchange.importer import import_traces; from mappa_graph.exchange.files import FileSource; "
        "from pathlib import Path; a, b = map(Path, sys.argv[1:]); "
        "import_traces(FileSource(a, b), b, progress=lambda done: print(done.traces, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path), str(run)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    before = len(stored(run))
    assert before > 100
    done = import_traces(FileSource(path, run), run)
    assert len(stored(run)) == 800 and done.live == 0
    assert done.traces + done.updated + done.known >= 800 - before
    import_traces(FileSource(path, tmp_path / "whole"), tmp_path / "whole")

    def plain(folder: Path) -> dict[str, EpisodeTrace]:
        return {t.episode.id: t for t in stored(folder)}

    assert plain(run) == plain(tmp_path / "whole")


def test_secrets_are_taken_out_before_anything_is_stored(tmp_path: Path) -> None:
    key, mail = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEF", "ann@example.org"
    row = {
        "id": "s",
        "messages": [{"role": "user", "content": f"my key is {key}, mail {mail}"}, {"role": "assistant", "content": "ok"}],
        "score": 1,
    }
    write(tmp_path / "c.jsonl", [row])
    command("import", str(tmp_path / "c.jsonl"), "--into", str(tmp_path / "run"), "--redact", "email")
    (trace,) = stored(tmp_path / "run")
    assert trace.actions[0].messages[0]["content"] == "my key is [KEY], mail [EMAIL]"
    for file in (tmp_path / "run").iterdir():
        assert key.encode() not in file.read_bytes() and mail.encode() not in file.read_bytes(), file

    def shout(payload: Any) -> Any:
        return json.loads(json.dumps(payload).replace("ok", "OK"))

    import_traces(FileSource(tmp_path / "c.jsonl", tmp_path), tmp_path / "own", redact=shout)
    assert stored(tmp_path / "own")[0].actions[0].output == "OK"


async def test_actions_find_their_tokens_in_the_gateways_store_by_id(tmp_path: Path) -> None:
    def echo(request: Request) -> dict[str, Any]:
        number = int(str(request.messages[-1]["content"]).split()[-1])
        return {"text": f"answer {number}", "prompt_ids": (1, number), "completion_ids": (2, number)}

    with LangSmith() as service:
        client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
        with TraceStore(tmp_path / "gateway" / "trace.db") as store:
            async with Gateway(ScriptedEngine("solver", answer=echo), store) as gateway:
                model = ChatOpenAI(model="solver", base_url=gateway.url, api_key="x")  # type: ignore[arg-type]

                async def node(state: MessagesState) -> Any:
                    return {"messages": [await model.ainvoke(state["messages"])]}

                app = StateGraph(MessagesState).add_node("solve", node).add_edge(START, "solve").compile()
                config: Any = {"callbacks": [LangChainTracer(client=client, project_name="p")]}
                for number in range(3):
                    await app.ainvoke({"messages": [("user", f"question {number}")]}, config)
                    async for _ in app.astream({"messages": [("user", f"question {number + 10}")]}, config, stream_mode="messages"):
                        pass
        client.flush(timeout=60)
        client.cleanup()
        plain = Client(api_url=service.url, api_key="x", auto_batch_tracing=False)
        # Into the gateway's own run, and into another one that is given the gateway's calls.
        for run, options in ((tmp_path / "gateway", {}), (tmp_path / "other", {"calls": tmp_path / "gateway" / "trace.db"})):
            done = import_traces(LangSmithSource("p", run, client=plain), run, **options)
            assert (done.traces, done.exact, done.text_only) == (6, 6, 0)
            for trace in stored(run):
                (action,) = trace.actions
                number = int(action.output.split()[-1])
                call = trace.calls[action.id]
                assert (call.prompt_ids, call.completion_ids) == ((1, number), (2, number))
                assert (action.agent, action.trainable) == ("solver", True)
                with TraceStore(run / "trace.db") as store:
                    store.add_verdict(trace.episode.id, action.id, Verdict(10.0))
            samples = [s for t in stored(run) for s in samples_from_trace(t, gamma=0.9)[0]]
            assert len(samples) == 6 and all(s.ret == 1.0 for s in samples)
        alone = import_traces(LangSmithSource("p", tmp_path / "alone", client=plain), tmp_path / "alone")
        assert (alone.exact, alone.text_only) == (0, 6)


async def test_mixed_traces_of_a_large_file_are_sorted_on_disk(tmp_path: Path) -> None:
    with OpenAIServer(lambda body: "") as server, LangSmith() as service:
        client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
        for _ in range(3):
            await run_live(tools(server), [LangChainTracer(client=client, project_name="p")])
        client.flush(timeout=60)
        client.cleanup()
        runs = sorted(service.runs.values(), key=lambda r: r["id"])
    by_trace: dict[str, list[Any]] = {}
    for run in runs:
        by_trace.setdefault(run["trace_id"], []).append(run)
    mixed = [r for group in zip(*(t for t in by_trace.values()), strict=True) for r in group]
    # In pieces that lie far apart: the first is taken for whole at first.
    first, *others = by_trace.values()
    filler = [
        {"id": f"f{i}", "trace_id": f"f{i}", "run_type": "chain", "name": "x", "start_time": "2026-01-01T00:00:00Z"} for i in range(2500)
    ]
    torn = [*first[:5], *filler, *first[5:], *(r for t in others for r in t)]
    want = {}
    for name, rows in (("sorted", [r for t in by_trace.values() for r in t]), ("mixed", mixed), ("torn", torn)):
        import_traces(FileSource(write(tmp_path / f"{name}.jsonl", rows), tmp_path / name), tmp_path / name)
        want[name] = {t.episode.id: t for t in stored(tmp_path / name)}
    assert want["sorted"] == want["mixed"] == want["torn"] and len(want["sorted"]) == 3
    # The rest of a trace is appended to a file that was imported: the trace is put together, and stays so.
    grown = write(tmp_path / "grown.jsonl", [*first[:5], *(r for t in others for r in t)])
    import_traces(FileSource(grown, tmp_path / "grown"), tmp_path / "grown")
    with open(grown, "a") as file:  # noqa: ASYNC230
        file.write("".join(json.dumps(r) + "\n" for r in first[5:]))
    for path in (grown, grown, tmp_path / "torn.jsonl"):
        run = tmp_path / path.stem
        done = import_traces(FileSource(path, run), run)
        assert (done.traces, done.failed) == (0, 0)
        assert {t.episode.id: t for t in stored(run)} == want["sorted"]
    assert not any(name.endswith(".spool") for folder in want for name in os.listdir(tmp_path / folder))


def test_what_is_asked_for_wrongly_is_said(tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl", [chat(1)])
    write(tmp_path / "what.jsonl", [{"hello": 1}])
    file, into = str(tmp_path / "c.jsonl"), ("--into", str(tmp_path / "run"))
    for words, what in (
        ((str(tmp_path / "nothing.jsonl"),), "there is no file"),
        ((str(tmp_path / "what.jsonl"),), "can't tell what"),
        ((file, "--format", "xml"), "there is no format 'xml'"),
        ((file, "--since", "7d"), "can't take effect with a file"),
        (("langsmith:", ), "names no project"),
        (("langsmith:p", "--since", "yesterday"), "is no time"),
        ((file, "--scale", "stars=5..1"), "is no range"),
        ((file, "--agent", "no spaces"), "not a valid name"),
        ((file, "--redact", "everything"), "no redaction rule"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            command("import", *words, *into)
    with pytest.raises(ConfigError, match="no place to write to"):
        command("feedback", str(tmp_path), "--to", "slack")
    assert "--agent" in command("import", "--help") and "--to" in command("feedback", "--help")


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("LANGSMITH_", "LANGCHAIN_", "MLFLOW_")):
            monkeypatch.delenv(name)
    yield

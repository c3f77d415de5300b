"""Exports: what rows hold, what is left out and said, that equal stores give equal bytes, and that a killed export goes on."""

import hashlib
import json
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from mappa_graph.commands import exporting
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.export import export
from mappa_graph.exchange.filters import Filters
from mappa_graph.exchange.formats import plain_render
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.pairs import Pairs
from mappa_graph.exchange.redact import Redactor, redactor
from mappa_graph.record import EpisodeTrace
from mappa_graph.store import TraceStore
from mappa_graph.trainers import token_advantages
from mappa_graph.trainers.batch import samples_from_trace
from tests.fakes.exported import TOOLS, episode, run_of

KEY = "sk-proj-abcdEFGH1234567890abcdEFGH1234567890"
SAMPLES = partial(samples_from_trace, gamma=0.5)


@pytest.fixture
def store(tmp_path):
    with TraceStore(run_of(tmp_path / "run") / "trace.db", read_only=True) as store:
        yield store


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_sft_rows_are_prompt_and_completion_with_tools(store, tmp_path):
    made = export(store, "sft", tmp_path / "sft.jsonl", filters=Filters(agents=("solver",)))
    rows = lines(tmp_path / "sft.jsonl")
    assert made.rows == len(rows) == 18
    first = rows[0]
    assert [m["role"] for m in first["prompt"]] == ["system", "user"]
    assert first["completion"] == [
        {
            "role": "assistant",
            "content": "<think>hm 0</think>",
            "tool_calls": [{"id": "e0-0-u", "type": "function", "function": {"name": "run", "arguments": {"code": "0+0"}}}],
        }
    ]
    assert json.loads(first["tools"]) == TOOLS
    told = {"agent": "solver", "action": "e0-0-s", "episode": "e0-0", "task_id": "task-0", "stratum": "odd", "score": 2.0, "version": 0}
    assert told.items() <= first.items()
    assert (first["outcome"], first["finish_reason"], first["split"]) == (0.0, "tool_calls", "train")


def test_messages_rows_are_whole_conversations_with_tool_answers(store, tmp_path):
    export(store, "messages", tmp_path / "m.jsonl", filters=Filters(agents=("writer",)))
    conversation = lines(tmp_path / "m.jsonl")[0]["messages"]
    assert [m["role"] for m in conversation] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation[2]["tool_calls"][0]["function"]["arguments"] == {"code": "0+0"}
    assert conversation[3] == {"role": "tool", "content": "0", "tool_call_id": "e0-0-u"}


def test_messages_can_become_plain_texts(store, tmp_path):
    export(store, "sft", tmp_path / "t.jsonl", filters=Filters(agents=("writer",)), render=plain_render)
    row = lines(tmp_path / "t.jsonl")[1]
    assert row["prompt"].startswith("system:\nYou solve sums.\n\nuser:\nWhat is 0 + 0?\n\nassistant:\n")
    assert row["completion"] == "The sum, written by sample 1, is 0."
    assert "tools" not in row
    export(store, "messages", tmp_path / "u.jsonl", filters=Filters(agents=("writer",)), render=plain_render)
    assert lines(tmp_path / "u.jsonl")[1]["text"] == row["prompt"] + row["completion"]


def test_thinking_can_be_stripped(store, tmp_path):
    made = export(store, "sft", tmp_path / "s.jsonl", options=Options(thinking="strip"), filters=Filters(agents=("solver",)))
    rows = lines(tmp_path / "s.jsonl")
    assert {row["completion"][0]["content"] for row in rows} == {"", *(f"It is {2 * i}." for i in range(6))}
    assert made.rows + made.card["left_out"].get("duplicate", 0) == 18


@pytest.mark.parametrize(
    ("filters", "rows", "left_out"),
    [
        ({"agents": ("writer",)}, 18, {"agent": 18}),
        ({"min_score": 6.0}, 6, {"score": 30}),
        ({"max_score": 4.0}, 6, {"score": 30}),
        ({"min_score": 5.0, "max_score": 5.0}, 24, {"score": 12}),
        ({"outcome": "failure"}, 12, {"episode: outcome": 12}),
        ({"outcome": "success"}, 24, {"episode: outcome": 6}),
        ({"since": 1_770_000_000.0 + 86_400 * 2, "until": 1_770_000_000.0 + 86_400 * 4}, 12, {"episode: date": 12}),
        ({"strata": ("odd",)}, 12, {"episode: stratum": 12}),
        ({"iteration": 1}, 18, {}),
        ({"min_length": 30}, 30, {"length": 6}),
        ({"max_length": 29}, 6, {"length": 30}),
        ({"max_prompt": 29}, 24, {"prompt length": 12}),
        ({"split": "heldout"}, None, {}),
    ],
)
def test_filters_leave_out_and_say_so(store, tmp_path, filters, rows, left_out):
    if rows is None:
        with pytest.raises(ConfigError, match="nothing to export as sft"):
            export(store, "sft", tmp_path / "f.jsonl", filters=Filters(**filters))
        assert not list(tmp_path.glob("*f.*"))
        return
    made = export(store, "sft", tmp_path / "f.jsonl", filters=Filters(**filters))
    assert (made.rows, made.card["left_out"]) == (rows, left_out)
    assert made.card["filters"].keys() >= filters.keys()


def test_what_cant_be_a_row_is_left_out_by_name(tmp_path):
    base = episode(1, 1)
    solved, wrote = base.actions
    odd = [
        replace(solved, id="a", finish_reason="length"),
        replace(solved, id="b", kept=False),
        replace(solved, id="c", output="", tool_calls=()),
        replace(solved, id="d", output="", tool_calls=(), error="down"),
        replace(solved, id="e", messages=()),
        replace(solved, id="f", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        replace(solved, id="g", messages=[{"role": "user", "content": [{"type": "text", "text": "one "}, "two"]}]),
    ]
    run = run_of(tmp_path / "run", tasks=0, extra=[EpisodeTrace(base.episode, base.transitions, tuple(odd))])
    run_of(run, tasks=0, extra=[EpisodeTrace(replace(base.episode, id="going", status="running"), base.transitions, (wrote,))])
    with TraceStore(run / "trace.db") as store:
        made = export(store, "sft", tmp_path / "x.jsonl")
        both = export(store, "sft", tmp_path / "y.jsonl", filters=Filters(truncated=True, discarded=True), options=Options(dedupe=False))
    assert made.card["left_out"] == {
        "truncated": 1, "discarded": 1, "no output": 1, "call failed": 1, "no prompt": 1, "more than text": 1,
        "episode: still running": 1,
    }  # fmt: skip
    assert lines(tmp_path / "x.jsonl")[0]["prompt"] == [{"role": "user", "content": "one two"}]
    assert both.rows == 3


def test_equal_rows_are_kept_once_and_counted(tmp_path):
    twins = [replace(episode(0, 1), episode=replace(episode(0, 1).episode, id=f"twin-{i}")) for i in range(4)]
    with TraceStore(run_of(tmp_path / "run", tasks=0, extra=twins) / "trace.db") as store:
        once = export(store, "sft", tmp_path / "a.jsonl")
        all_ = export(store, "sft", tmp_path / "b.jsonl", options=Options(dedupe=False))
        tokens = export(store, "rl", tmp_path / "c.jsonl", samples=SAMPLES)
    assert (once.rows, once.card["left_out"]) == (2, {"duplicate": 6})
    assert (all_.rows, tokens.rows) == (8, 8)


def test_strata_are_balanced_down_to_the_rarest(store, tmp_path):
    made = export(store, "sft", tmp_path / "b.jsonl", options=Options(balance="stratum"))
    assert made.card["by"]["stratum"] == {"even": 12, "odd": 12}
    assert made.card["left_out"]["balance: even"] == 12
    again = export(store, "sft", tmp_path / "b2.jsonl", options=Options(balance="stratum"))
    tokens = export(store, "rl", tmp_path / "t.jsonl", samples=SAMPLES, options=Options(balance="agent"), filters=Filters(strata=("odd",)))
    assert tokens.card["by"]["agent"] == {"solver": 6, "writer": 6}
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "b2.jsonl").read_bytes()
    assert again.card["files"][0]["sha256"] == made.card["files"][0]["sha256"]


def test_a_task_is_on_one_side_of_the_split_only(tmp_path):
    with TraceStore(run_of(tmp_path / "run", tasks=40, samples=2) / "trace.db") as store:
        made = export(store, "sft", tmp_path / "d.jsonl", options=Options(heldout=0.25))
        other = export(store, "sft", tmp_path / "e.jsonl", options=Options(heldout=0.25, salt="another"))
    sides = {side: {row["task_id"] for row in lines(path)} for side, path in made.files.items()}
    assert made.files["heldout"].name == "d-heldout.jsonl"
    assert not sides["train"] & sides["heldout"]
    assert len(sides["train"] | sides["heldout"]) == 40
    assert 4 <= len(sides["heldout"]) <= 18
    assert {row["task_id"] for row in lines(other.files["heldout"])} != sides["heldout"]


def test_a_held_out_file_of_an_earlier_export_does_not_stay(store, tmp_path):
    export(store, "sft", tmp_path / "d.jsonl", options=Options(heldout=0.4))
    assert (tmp_path / "d-heldout.jsonl").exists()
    export(store, "sft", tmp_path / "d.jsonl")
    assert sorted(path.name for path in tmp_path.glob("*d*") if path.is_file()) == ["d.jsonl", "d.jsonl.card.json", "d.jsonl.card.md"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("format", ["sft", "dpo", "rl"])
def test_the_same_store_and_options_give_the_same_bytes(store, tmp_path, kind, format):
    contents = []
    for name in ("one", "two"):
        folder = tmp_path / name
        samples = SAMPLES if format == "rl" else None
        export(store, format, folder / "data", kind=kind, options=Options(heldout=0.3), samples=samples)
        contents.append({path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()})
    assert contents[0] == contents[1]
    assert len(contents[0]) >= 4


def test_the_card_says_what_is_there(store, tmp_path):
    rules = redactor("email", ["ticket=T-[0-9]+"])
    made = export(store, "sft", tmp_path / "c.parquet", filters=Filters(min_score=5.0), options=Options(heldout=0.3), redactor=rules)
    card = json.loads((tmp_path / "c.parquet.card.json").read_text())
    assert card == json.loads(json.dumps(made.card))
    for file in card["files"]:
        data = (tmp_path / file["name"]).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file["sha256"], file["bytes"])
    assert card["rows"] == {file["side"]: file["rows"] for file in card["files"]}
    assert card["source"] == {
        "episodes": 18, "actions": 36, "episodes_read": 18, "actions_seen": 36, "environments": ["sums"], "policies": ["solver", "writer"],
        "first_episode": "2026-02-02", "last_episode": "2026-02-07",
    }  # fmt: skip
    assert card["licence"].startswith("not set")
    assert [rule["rule"] for rule in card["redaction"]] == ["keys", "ticket", "email"]
    assert (card["scores"]["count"], card["scores"]["min"]) == (30, 5.0)
    page = (tmp_path / "c.parquet.card.md").read_text()
    assert all(
        text in page for text in ("30 rows", "`sft`", "ticket", "T-[0-9]+", card["files"][0]["sha256"], "load_dataset", "**Licence:**")
    )


def test_an_agents_name_cant_break_the_card(tmp_path):
    bad = "x | <script>\n# evil"
    trace = episode(0, 1)
    trace = replace(trace, actions=tuple(replace(a, agent=bad) for a in trace.actions))
    with TraceStore(run_of(tmp_path / "run", tasks=0, extra=[trace]) / "trace.db") as store:
        export(store, "sft", tmp_path / "c.jsonl")
    page = (tmp_path / "c.jsonl.card.md").read_text()
    assert "<script>" not in page
    assert "\n# evil" not in page


# --- tokens


def test_rl_rows_hold_the_engines_tokens_and_the_trainers_returns(store, tmp_path):
    made = export(store, "rl", tmp_path / "rl.jsonl", samples=SAMPLES)
    rows = lines(tmp_path / "rl.jsonl")
    samples = [sample for trace in store.traces() for sample in SAMPLES(trace)[0]]
    assert made.rows == len(rows) == len(samples) == 36
    for row, sample in zip(rows, samples, strict=True):
        assert tuple(row["prompt_ids"]) == sample.prompt_ids
        assert tuple(row["completion_ids"]) == sample.completion_ids
        assert tuple(row["logprobs"]) == sample.engine_logprobs
        assert (row["return"], row["agent"], row["policy"]) == (sample.ret, sample.agent, sample.policy)
    assert {row["version"] for row in rows} == {0, 1, 2}
    assert "gamma=0.5" in made.card["options"]["returns"]


@pytest.mark.parametrize("normalise", ["batch", "agent", "stratum"])
def test_rl_advantages_are_those_of_the_trainer_without_kl(store, tmp_path, normalise):
    export(store, "rl", tmp_path / "rl.jsonl", samples=SAMPLES, options=Options(normalise=normalise))
    rows = lines(tmp_path / "rl.jsonl")
    groups = None if normalise == "batch" else [row[normalise] for row in rows]
    kl = [[0.0] * len(row["completion_ids"]) for row in rows]
    expected = token_advantages([row["return"] for row in rows], kl, 0.0, 0.05, normalise=normalise, groups=groups)
    assert [row["advantage"] for row in rows] == pytest.approx([advantages[0] for advantages in expected], abs=1e-9)


def test_equal_scores_give_advantages_of_zero(tmp_path):
    with TraceStore(run_of(tmp_path / "run") / "trace.db") as store:
        export(store, "rl", tmp_path / "rl.jsonl", samples=partial(samples_from_trace, gamma=0.0), filters=Filters(agents=("writer",)))
    assert {row["advantage"] for row in lines(tmp_path / "rl.jsonl")} == {0.0}


def test_rl_refuses_what_is_text_only_by_name_and_count(tmp_path):
    run = run_of(tmp_path / "run", tasks=2, samples=2, tokens=False)
    with TraceStore(run / "trace.db") as store:
        with pytest.raises(ConfigError, match="no tokens: text only 8; text only are solver 4, writer 4"):
            export(store, "rl", tmp_path / "rl.jsonl", samples=SAMPLES)
        assert export(store, "sft", tmp_path / "sft.jsonl").card["text_only"] == {"solver": 4, "writer": 4}
    run_of(run, tasks=0, extra=[episode(9, 1)])
    with TraceStore(run / "trace.db") as store:
        mixed = export(store, "rl", tmp_path / "rl.jsonl", samples=SAMPLES)
    assert (mixed.rows, mixed.card["text_only"]) == (2, {"solver": 4, "writer": 4})
    assert mixed.card["left_out"] == {"no tokens: text only": 8}


def test_rl_lengths_are_tokens(store, tmp_path):
    made = export(store, "rl", tmp_path / "rl.jsonl", samples=SAMPLES, filters=Filters(min_length=14))
    assert {len(row["completion_ids"]) for row in lines(tmp_path / "rl.jsonl")} == {14}
    assert made.card["left_out"] == {"length": 24}


# --- redaction


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("format", ["sft", "messages", "dpo", "kto", "reward", "rl"])
def test_a_key_never_reaches_an_exported_file(tmp_path, format, kind):
    leaky = []
    for sample in range(3):
        trace = episode(1, sample, text=f"sample {sample} found {KEY} there")
        solved, wrote = trace.actions
        messages = [{"role": "user", "content": f"my key is {KEY}"}, {"role": "tool", "content": f"error: {KEY}", "tool_call_id": "t"}]
        use = [{"id": "u", "type": "function", "function": {"name": "run", "arguments": json.dumps({"code": KEY, KEY: [KEY]})}}]
        actions = (replace(solved, messages=messages, tool_calls=use, error=None), wrote)
        verdicts = {**trace.verdicts, solved.id: replace(trace.verdicts[solved.id], better_action=f"use {KEY} better")}
        leaky.append(replace(trace, actions=actions, verdicts=verdicts, episode=replace(trace.episode, stratum=KEY)))
    with TraceStore(run_of(tmp_path / "run", tasks=2, extra=leaky) / "trace.db") as store:
        made = export(store, format, tmp_path / "out" / "data", kind=kind, samples=SAMPLES if format == "rl" else None)
    assert made.rows
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    if kind == "parquet":
        import pyarrow.parquet as pq

        assert KEY not in str(pq.read_table(tmp_path / "out" / "data").to_pylist())
    assert made.card["redaction"][0]["found"] > 0
    assert sum(made.card["left_out"].values()) >= 3 if format == "rl" else True


def test_the_work_file_of_a_killed_export_holds_no_key(tmp_path):
    trace = episode(1, 1, text=f"found {KEY}")
    with TraceStore(run_of(tmp_path / "run", tasks=3, extra=[trace]) / "trace.db") as store:
        with pytest.raises(KeyboardInterrupt):
            export(store, "sft", tmp_path / "out" / "a.jsonl", progress=interrupt_at("write"))
    left = list((tmp_path / "out").iterdir())
    assert any(path.name == ".a.jsonl.work" for path in left)
    assert not any(KEY.encode() in path.read_bytes() for path in left)


def test_redaction_is_counted_and_comes_before_deduplication(tmp_path):
    same = [episode(1, 1, text=f"write to {who}@x.org") for who in ("ann", "bob")]
    same = [replace(t, episode=replace(t.episode, id=f"e{i}")) for i, t in enumerate(same)]
    with TraceStore(run_of(tmp_path / "run", tasks=0, extra=same) / "trace.db") as store:
        made = export(store, "sft", tmp_path / "a.jsonl", filters=Filters(agents=("solver",)), redactor=Redactor(["email"]))
    assert made.rows == 1
    assert {rule["rule"]: rule["found"] for rule in made.card["redaction"]} == {"keys": 0, "email": 2}


def test_texts_that_no_reader_can_hold_are_mended(tmp_path):
    import pyarrow.parquet as pq

    trace = episode(1, 1, text="half a pair \ud800, nul \0, and a wide 😀")
    solved = trace.actions[0]
    use = [{"id": "u", "type": "function", "function": {"name": "run", "arguments": json.dumps({"n": 2**80, "s": "\ud800"})}},
           {"id": "v", "type": "function", "function": {"name": "run", "arguments": "not json"}},
           {"id": "w", "type": "function", "function": {"name": "run", "arguments": "[" * 3000}}]  # fmt: skip
    trace = replace(trace, actions=(replace(solved, tool_calls=use),))
    with TraceStore(run_of(tmp_path / "run", tasks=0, extra=[trace]) / "trace.db") as store:
        export(store, "sft", tmp_path / "a.parquet")
        export(store, "sft", tmp_path / "a.jsonl")
    said = lines(tmp_path / "a.jsonl")[0]["completion"][0]
    assert said["content"] == "half a pair \ufffd, nul \0, and a wide 😀"
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"n": str(2**80), "s": "\ufffd"}, "not json", "[" * 3000]
    assert json.loads(pq.read_table(tmp_path / "a.parquet").to_pylist()[0]["completion"][0]) == said


# --- killed and begun again


def interrupt_at(stage, after=1):
    calls = {"n": 0}

    def progress(name, done, total):
        calls["n"] += name == stage
        if name == stage and calls["n"] >= after:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(("format", "stage"), [("sft", "read"), ("sft", "write"), ("dpo", "read"), ("dpo", "write"), ("rl", "read")])
def test_a_killed_export_goes_on_and_ends_as_one_that_was_not(tmp_path, monkeypatch, format, stage):
    monkeypatch.setattr("mappa_graph.exchange.export._COMMIT_EVERY", 4)
    samples = SAMPLES if format == "rl" else None
    rules = Redactor(["email"])
    trace = episode(0, 5, text="ann@x.org")
    read: list[str] = []
    with TraceStore(run_of(tmp_path / "run", extra=[trace]) / "trace.db") as store:
        whole = export(store, format, tmp_path / "a" / "x.jsonl", samples=samples, redactor=Redactor(["email"]))
        with pytest.raises(KeyboardInterrupt):
            export(
                store,
                format,
                tmp_path / "b" / "x.jsonl",
                samples=samples,
                redactor=rules,
                progress=interrupt_at(stage, 3 if stage == "read" else 1),
            )
        assert not (tmp_path / "b" / "x.jsonl").exists()
        real = store.episode
        monkeypatch.setattr(store, "episode", lambda id: read.append(id) or real(id))
        again = export(store, format, tmp_path / "b" / "x.jsonl", samples=samples, redactor=rules)
    assert again.resumed
    assert not whole.resumed
    assert len(read) == (19 - 12 if stage == "read" else 0)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]


def test_other_options_or_another_store_begin_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("mappa_graph.exchange.export._COMMIT_EVERY", 4)
    run = run_of(tmp_path / "run")
    with TraceStore(run / "trace.db") as store:
        for more in ({"filters": Filters(min_score=5.0)}, {"redactor": redactor("all")}, {"resume": False}):
            with pytest.raises(KeyboardInterrupt):
                export(store, "sft", tmp_path / "x.jsonl", progress=interrupt_at("read", 2))
            assert not export(store, "sft", tmp_path / "x.jsonl", **more).resumed
        with pytest.raises(KeyboardInterrupt):
            export(store, "sft", tmp_path / "x.jsonl", progress=interrupt_at("read", 2))
    run_of(run, tasks=0, extra=[episode(9, 1)])
    with TraceStore(run / "trace.db") as store:
        made = export(store, "sft", tmp_path / "x.jsonl")
    assert not made.resumed
    assert made.rows == 38


def test_a_spoiled_work_file_is_begun_anew(store, tmp_path):
    (tmp_path / ".x.jsonl.work").write_bytes(b"not a database, and longer than a header would be" * 20)
    assert export(store, "sft", tmp_path / "x.jsonl").rows == 36
    assert not (tmp_path / ".x.jsonl.work").exists()


def test_what_no_export_wrote_is_not_overwritten(store, tmp_path):
    (tmp_path / "x.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="no export wrote it"):
        export(store, "sft", tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_text() == "mine"
    export(store, "sft", tmp_path / "x.jsonl", force=True)
    assert export(store, "dpo", tmp_path / "x.jsonl").rows


def test_no_force_replaces_a_folder_of_other_things(store, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "home.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    for out, said in (("home", "holds other things"), ("home.jsonl", "is a folder"), ("file/x.jsonl", "can't make the folder")):
        with pytest.raises(ConfigError, match=said):
            export(store, "sft", tmp_path / out, force=True)
    with pytest.raises(ConfigError, match="holds other things"):
        export(store, "sft", tmp_path / "home", force=True, options=Options(heldout=0.3))
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    export(store, "sft", tmp_path / "data")
    assert export(store, "dpo", tmp_path / "data").rows


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"format": "ppo"}, "no format 'ppo'"),
        ({"format": "rl"}, "needs samples="),
        ({"format": "sft", "samples": SAMPLES}, "no effect on the format sft"),
        ({"format": "rl", "samples": SAMPLES, "render": plain_render}, "holds tokens"),
        ({"format": "sft", "out": "x.csv"}, "doesn't say what to write"),
        ({"format": "sft", "kind": "csv"}, "can't be written as 'csv'"),
        ({"format": "sft", "options": Options(pairs=Pairs(min_margin=2.0))}, "pairs has no effect"),
        ({"format": "dpo", "options": Options(pairs=Pairs(sources=("scores",)))}, "scores has no effect"),
        ({"format": "kto", "options": Options(pairs=Pairs(good=8.0))}, "good and bad has no effect"),
        ({"format": "sft", "options": Options(normalise="agent")}, "normalise has no effect"),
        ({"format": "sft", "options": Options(salt="x")}, "salt has no effect"),
    ],
)
def test_options_that_cant_take_effect_are_refused(store, tmp_path, call, said):
    call = {"out": "x.jsonl", **call}
    with pytest.raises(ConfigError, match=said):
        export(store, call.pop("format"), tmp_path / call.pop("out"), **call)
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("x*")]


# --- the command


@pytest.fixture
def command(tmp_path):
    import typer

    app = typer.Typer()
    exporting.register(app)
    app.command("other")(lambda: None)
    run = run_of(tmp_path / "run")

    def call(*args):
        return CliRunner().invoke(app, ["export", str(run), *map(str, args)], env={"COLUMNS": "200"})

    return call


def test_the_command_writes_the_file_and_says_what_was_left_out(command, tmp_path):
    out = tmp_path / "data" / "sft.parquet"
    done = command("--format", "sft", "--out", out, "--min-score", 5, "--agent", "solver", "--since", "2026-02-03", "--heldout", 0.2,
                   "--redact", "email,phone", "--redact-pattern", "ward=ward [0-9]+")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "score" in done.output
    card = json.loads((tmp_path / "data" / "sft.parquet.card.json").read_text())
    assert card["filters"]["since"] == "2026-02-03T00:00:00+00:00"
    assert [rule["rule"] for rule in card["redaction"]] == ["keys", "ward", "email", "phone"]
    assert out.exists()


def test_the_command_makes_returns_with_the_trainer(command, tmp_path):
    done = command("--format", "rl", "--out", tmp_path / "rl.jsonl", "--gamma", 0.25, "--normalise", "agent", "-q")
    assert done.exit_code == 0, done.output
    assert "gamma=0.25" in json.loads((tmp_path / "rl.jsonl.card.json").read_text())["options"]["returns"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--format", "sft", "--gamma", "0.5"], "returns are of the format rl"),
        (["--format", "sft", "--min-margin", "2"], "preferences have no effect"),
        (["--format", "rl", "--gamma", "0.5", "--credit", "own"], "gamma has no effect"),
        (["--format", "sft", "--since", "yesterday"], "'yesterday' is no date"),
        (["--format", "dpo", "--pairs-from", "nowhere"], "preferences from"),
        (["--format", "sft", "--redact", "names"], "no redaction rule 'names'"),
        (["--format", "sft", "--tokenizer", "/nowhere/at/all"], "no tokenizer can be loaded"),
    ],
)
def test_the_command_refuses_what_cant_take_effect(command, tmp_path, args, said):
    done = command(*args, "--out", tmp_path / "x.jsonl")
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)

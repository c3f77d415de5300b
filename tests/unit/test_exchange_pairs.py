"""Preferences: which actions are siblings, which of them is better, and what a coach proposed."""

import json
from dataclasses import replace

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.exchange.export import export
from mappa_graph.exchange.filters import Filters
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.pairs import Pairs, Sibling, best_and_worst
from mappa_graph.record import EpisodeTrace, Verdict
from mappa_graph.store import TraceStore
from tests.fakes.exported import episode, run_of

SIBLINGS = Options(pairs=Pairs(sources=("siblings",)))
COACH = Options(pairs=Pairs(sources=("coach",)))


def rows_of(tmp_path, format="dpo", *, traces=None, options=SIBLINGS, filters=None, **more):
    run = run_of(tmp_path / "run", **({"tasks": 0, "extra": traces} if traces is not None else {}))
    with TraceStore(run / "trace.db") as store:
        made = export(store, format, tmp_path / "out.jsonl", options=options, filters=filters, force=True, **more)
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()], made


def test_the_best_sibling_is_preferred_to_the_worst(tmp_path):
    rows, made = rows_of(tmp_path)
    assert len(rows) == made.rows == 6  # the writers' scores are all the same
    assert made.card["left_out"]["state: margin too small"] > 0
    for task, row in enumerate(rows):
        assert (row["chosen_action"], row["rejected_action"]) == (f"e{task}-2-s", f"e{task}-0-s")
        assert (row["chosen_score"], row["rejected_score"], row["margin"]) == (8.0, 2.0, pytest.approx(0.6))
        assert row["chosen"][0]["content"] == "<think>hm 2</think>"
        assert (row["source"], row["agent"], row["task_id"]) == ("siblings", "solver", f"task-{task}")


def test_other_tasks_agents_prompts_and_tokens_are_other_states(tmp_path):
    low, high = episode(0, 0), episode(0, 2)

    def alone(trace):
        return EpisodeTrace(trace.episode, trace.transitions, trace.actions[:1], (), trace.verdicts, trace.calls)

    low, high = alone(low), alone(high)
    solved = high.actions[0]
    variants = {
        "same": high,
        "task": replace(high, episode=replace(high.episode, task_id="another")),
        "agent": replace(high, actions=(replace(solved, agent="other"),)),
        "tokens": replace(high, calls={solved.id: replace(high.calls[solved.id], prompt_ids=(1, 2, 3))}),
    }
    for name, variant in variants.items():
        folder = tmp_path / name
        if name == "same":
            assert len(rows_of(folder, traces=[low, variant])[0]) == 1
        else:
            with pytest.raises(ConfigError, match="nothing to export as dpo"):
                rows_of(folder, traces=[low, variant])
    text_low, text_high = (replace(t, calls={}) for t in (low, high))
    assert len(rows_of(tmp_path / "texts", traces=[text_low, text_high])[0]) == 1
    other = replace(text_high, actions=(replace(solved, messages=[{"role": "user", "content": "else"}]),))
    with pytest.raises(ConfigError, match="nothing to export"):
        rows_of(tmp_path / "prompts", traces=[text_low, other])


def test_tasks_without_ids_are_told_by_their_text(tmp_path):
    traces = [replace(episode(t, s), episode=replace(episode(t, s).episode, task_id="")) for t in range(2) for s in (0, 2)]
    rows, _ = rows_of(tmp_path, traces=traces)
    assert len(rows) == 2


def test_the_margin_decides(tmp_path):
    rows, _ = rows_of(tmp_path, options=Options(pairs=Pairs(sources=("siblings",), min_margin=6.0)))
    assert len(rows) == 6
    with pytest.raises(ConfigError, match="margin too small"):
        rows_of(tmp_path, options=Options(pairs=Pairs(sources=("siblings",), min_margin=6.1)))


def test_one_texts_scores_are_averaged_so_that_it_is_never_preferred_to_itself(tmp_path):
    twice = []
    for i, score in enumerate((9.0, 1.0)):
        trace = episode(0, 1)
        solved = trace.actions[0]
        twice.append(replace(trace, episode=replace(trace.episode, id=f"twin{i}"), actions=(solved,), verdicts={solved.id: Verdict(score)}))
    with pytest.raises(ConfigError, match="nothing to export"):
        rows_of(tmp_path / "a", traces=twice)
    low = episode(0, 0)
    rows, _ = rows_of(tmp_path / "b", traces=[*twice, low])
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(5.0, 2.0)]


def test_several_pairs_of_one_state_go_from_the_ends_inwards():
    siblings = [Sibling(i, score) for i, score in enumerate((9.0, 8.0, 5.0, 4.5, 2.0, 1.0))]
    pairs = Pairs(per_state=3, min_margin=1.0)
    assert [(a.score, b.score) for a, b in best_and_worst(iter(siblings), pairs)] == [(9.0, 1.0), (8.0, 2.0)]
    assert [(a.key, b.key) for a, b in best_and_worst(siblings[:3], pairs)] == [(0, 2)]
    assert list(best_and_worst(siblings[:1], pairs)) == []


def test_the_coachs_better_action_is_preferred_to_what_was_done(tmp_path):
    rows, _ = rows_of(tmp_path, options=COACH)
    assert len(rows) == 6
    first = rows[0]
    assert first["chosen"] == [{"role": "assistant", "content": "Say that it is 0."}]
    assert first["rejected"][0]["content"] == "<think>hm 0</think>"
    assert (first["source"], first["chosen_score"], first["rejected_score"], first["margin"]) == ("coach", None, 2.0, 0.0)


def test_a_proposal_that_is_what_was_done_is_no_preference(tmp_path):
    trace = episode(0, 1)
    wrote = trace.actions[1]
    verdicts = {wrote.id: Verdict(3.0, better_action=wrote.output)}
    with pytest.raises(ConfigError, match="nothing to export"):
        rows_of(tmp_path, traces=[replace(trace, verdicts=verdicts)], options=COACH)


def test_kto_rows_are_single_completions_with_a_label(tmp_path):
    rows, _ = rows_of(tmp_path, "kto", options=Options(pairs=Pairs()))
    assert {row["source"] for row in rows} == {"siblings", "coach"}
    by_task = [row for row in rows if row["task_id"] == "task-0"]
    assert [(row["label"], row["source"]) for row in by_task] == [(True, "coach"), (False, "coach"), (True, "siblings")]
    texts = [json.dumps([row["prompt"], row["completion"]]) for row in rows]
    assert len(texts) == len(set(texts))


def test_kto_by_scores_leaves_out_what_is_neither(tmp_path):
    rows, made = rows_of(tmp_path, "kto", options=Options(pairs=Pairs(sources=("scores",), good=8.0, bad=4.0)))
    assert {(row["score"], row["label"]) for row in rows} == {(8.0, True), (2.0, False)}
    assert made.card["left_out"] == {"between good and bad": 24}


def test_a_text_is_never_both_good_and_bad(tmp_path):
    pair = []
    for i, score in enumerate((9.0, 1.0)):
        trace = episode(0, 1)
        solved = trace.actions[0]
        pair.append(replace(trace, episode=replace(trace.episode, id=f"twin{i}"), actions=(solved,), verdicts={solved.id: Verdict(score)}))
    rows, made = rows_of(tmp_path, "kto", traces=pair, options=Options(pairs=Pairs(sources=("scores",))))
    assert [row["label"] for row in rows] == [True]
    assert made.card["left_out"] == {"contradicted": 1}


def test_reward_rows_carry_the_margin(tmp_path):
    rows, _ = rows_of(tmp_path, "reward", options=Options())
    assert {round(row["margin"], 9) for row in rows} == {0.0, 0.6}
    assert all(isinstance(row["margin"], float) for row in rows)


def test_filters_hold_for_both_sides_of_a_pair(tmp_path):
    rows, _ = rows_of(tmp_path, filters=Filters(min_score=4.0))
    assert {(row["chosen_score"], row["rejected_score"]) for row in rows} == {(8.0, 5.0)}


def test_pairs_keep_their_task_on_one_side(tmp_path):
    rows, made = rows_of(tmp_path, options=Options(heldout=0.4, pairs=Pairs()))
    held = [json.loads(line) for line in made.files["heldout"].read_text().splitlines()]
    assert {row["task_id"] for row in rows}.isdisjoint(row["task_id"] for row in held)
    assert {row["source"] for row in rows} == {"coach", "siblings"}


@pytest.mark.parametrize(
    "bad",
    [{"sources": ()}, {"sources": ("votes",)}, {"min_margin": 0.0}, {"min_margin": 11.0}, {"per_state": 0}, {"good": 3.0, "bad": 3.0}],
)
def test_preferences_that_cant_be_made_are_refused(bad):
    with pytest.raises(ConfigError):
        Pairs(**bad)

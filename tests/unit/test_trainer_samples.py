"""From a trace to samples: what is trained on, what is left out and why, and that no token is anybody's but the engine's."""

from dataclasses import replace

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Outcome, Verdict
from mappa_graph.trainers import samples_from_trace


def act(number, agent="solver", **rest):
    return Action(id=f"a{number}", transition_id=f"t{number}", agent=agent, policy=agent, order=number, call_id=f"c{number}", **rest)


def call(number, agent="solver", **rest):
    defaults = {"completion_ids": (30 + number, 40 + number), "logprobs": (-0.5, -0.25), "finish_reason": "stop"}
    return Call(id=f"c{number}", policy=agent, version=0, prompt_ids=(1, 2, 10 + number), **{**defaults, **rest})


def trace(*, scores, edges=(), calls=None, actions=None, outcome=None):
    made = actions or [act(i) for i in range(len(scores))]
    calls = calls or {a.id: call(i, a.agent) for i, a in enumerate(made)}
    return EpisodeTrace(
        episode=Episode(id="e", stratum="hard", outcome=outcome),
        actions=tuple(made),
        edges=tuple(edges),
        verdicts={a.id: Verdict(s) for a, s in zip(made, scores, strict=True)},
        calls={k: c for k, c in calls.items() if c is not None},
    )


def test_samples_carry_the_engines_tokens_and_the_episodes_returns():
    given = trace(scores=[2, 10, 6], edges=[(0, 1), (1, 2)], calls={f"a{i}": call(i, sampling={"temperature": 0.6}) for i in range(3)})
    samples, left_out = samples_from_trace(given, gamma=0.5)
    assert [s.ret for s in samples] == pytest.approx([0.85 / 1.75, 1.3 / 1.5, 0.6])
    for i, sample in enumerate(samples):
        assert sample.prompt_ids == given.calls[f"a{i}"].prompt_ids and sample.completion_ids == given.calls[f"a{i}"].completion_ids
        assert sample.engine_logprobs == (-0.5, -0.25) and sample.temperature == 0.6
        assert (sample.agent, sample.policy, sample.episode, sample.action_id, sample.stratum) == ("solver", "solver", "e", f"a{i}", "hard")
    assert +left_out == {} and left_out["retokenised"] == 0 and "retokenised" in left_out


def test_own_credit_ignores_what_followed():
    samples, _ = samples_from_trace(trace(scores=[2, 10], edges=[(0, 1)]), gamma=0.9, credit="own")
    assert [s.ret for s in samples] == [0.2, 1.0]


@pytest.mark.parametrize(
    ("reason", "change", "call_change"),
    [
        ("untrainable", {"trainable": False}, {}),
        ("discarded", {"kept": False}, {}),
        ("no_call", {}, None),
        ("failed", {"error": "boom"}, None),
        ("failed", {}, {"finish_reason": "abort"}),
        ("no_tokens", {}, {"completion_ids": (), "logprobs": ()}),
        ("no_tokens", {}, {"prompt_ids": ()}),
        ("bad_logprobs", {}, {"logprobs": (float("nan"), -1.0)}),
        ("bad_logprobs", {}, {"logprobs": (float("-inf"), -1.0)}),
        ("truncated", {}, {"finish_reason": "length"}),
    ],
)
def test_what_is_left_out_is_counted_under_its_reason(reason, change, call_change):
    given = trace(scores=[4, 8], edges=[(0, 1)])
    actions = (given.actions[0], replace(given.actions[1], **change))
    calls = dict(given.calls)
    if call_change is None:
        del calls["a1"]
    else:
        calls["a1"] = replace(calls["a1"], **call_change)
    samples, left_out = samples_from_trace(replace(given, actions=actions, calls=calls), gamma=1.0)
    assert [s.action_id for s in samples] == ["a0"] and +left_out == {reason: 1}
    # Only an action whose output went nowhere gives no credit to what came before it.
    assert samples[0].ret == pytest.approx(0.4 if reason == "discarded" else 0.6)


def test_no_verdict_means_no_sample_and_no_credit():
    given = trace(scores=[4, None, 8], edges=[(0, 1), (1, 2)])
    samples, left_out = samples_from_trace(given, gamma=1.0)
    assert [(s.action_id, s.ret) for s in samples] == [("a0", pytest.approx(0.6)), ("a2", 0.8)] and left_out["no_verdict"] == 1
    missing = replace(given, verdicts={"a0": Verdict(4.0)})
    samples, left_out = samples_from_trace(missing, gamma=1.0)
    assert [s.ret for s in samples] == [0.4] and left_out["no_verdict"] == 2


def test_a_frozen_agents_verdict_still_gives_credit_to_earlier_agents():
    given = trace(scores=[0, 10], edges=[(0, 1)], actions=[act(0), act(1, "judge", trainable=False)])
    samples, left_out = samples_from_trace(given, gamma=1.0)
    assert [s.ret for s in samples] == [0.5] and left_out["untrainable"] == 1


def test_truncated_completions_can_be_trained_on():
    given = trace(scores=[5], calls={"a0": call(0, finish_reason="length")})
    samples, left_out = samples_from_trace(given, gamma=0.0, truncated="train")
    assert samples[0].truncated and +left_out == {}


def test_the_outcome_joins_the_last_scored_actions_score():
    given = trace(scores=[4, 8, None], edges=[(0, 1), (1, 2)], outcome=Outcome(success=False))
    samples, _ = samples_from_trace(given, gamma=1.0, outcome_weight=1.0)
    assert [s.ret for s in samples] == pytest.approx([(0.4 + 0.4) / 2, 0.4])  # (0.8 + 1 * 0.0) / 2 = 0.4 for the last
    won = replace(given, episode=replace(given.episode, outcome=Outcome(success=True)))
    samples, _ = samples_from_trace(won, gamma=0.0, outcome_weight=3.0)
    assert [s.ret for s in samples] == pytest.approx([0.4, (0.8 + 3.0) / 4])
    samples, _ = samples_from_trace(replace(given, episode=Episode(id="e")), gamma=0.0, outcome_weight=3.0)
    assert [s.ret for s in samples] == [0.4, 0.8]


def test_a_fork_of_parallel_agents_is_joined_by_position_not_by_time():
    actions = [act(0, "planner"), act(1, "left"), act(2, "right"), act(3, "judge")]
    given = trace(scores=[0, 10, 0, 10], edges=[(0, 1), (0, 2), (1, 3), (2, 3)], actions=actions)
    samples, _ = samples_from_trace(given, gamma=0.5)
    assert [s.ret for s in samples] == pytest.approx([(0.5 + 0.25) / 2.25, (1.0 + 0.5) / 1.5, 0.5 / 1.5, 1.0])
    assert [s.policy for s in samples] == ["planner", "left", "right", "judge"]


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match="credit is 'both'"):
        samples_from_trace(trace(scores=[1]), gamma=0.5, credit="both")
    with pytest.raises(ConfigError, match="truncated is 'drop'"):
        samples_from_trace(trace(scores=[1]), gamma=0.5, truncated="drop")
    with pytest.raises(ConfigError, match="outcome_weight is -1"):
        samples_from_trace(trace(scores=[1]), gamma=0.5, outcome_weight=-1)

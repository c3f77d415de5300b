"""Settings: mistakes are named, with the way out; nothing is ignored."""

import re
from typing import get_args, get_origin

import pytest

from mappa_graph.config import RunConfig, load_config, make_config
from mappa_graph.configs import find, names
from mappa_graph.errors import ConfigError
from mappa_graph.sections.base import Section
from mappa_graph.trainers.offline import make_offline_config


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"train\.iteration: unknown setting; did you mean 'iterations'"):
        make_config({"train": {"iteration": 3}})


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        make_config({"train": {"lr": -1}, "rollout": {"tasks": 0}, "speed": 3})
    assert all(part in str(caught.value) for part in ("train.lr", "rollout.tasks", "speed", "got -1"))


def test_options_that_cannot_take_effect_are_refused():
    with pytest.raises(ConfigError, match=r"needs coach\.when 'episode'"):
        make_config({"coach": {"kind": "outcome"}})
    with pytest.raises(ConfigError, match=r"no effect with train\.credit 'own'"):
        make_config({"train": {"credit": "own", "gamma": 0.5}})
    with pytest.raises(ConfigError, match="top_p must be 1"):
        make_config({"rollout": {"top_p": 0.9}})


def floats(model, path=()):
    """Dotted names of every number that may have a fraction."""
    for name, field in model.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if float in kinds:
            yield ".".join((*path, name))
        for inner in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)):
            if get_origin(field.annotation) is not dict:
                yield from floats(inner, (*path, name))


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "inf", "NaN", "1e400"])
def test_no_number_may_be_infinite_or_none(value):
    names = list(floats(RunConfig))
    assert {"train.lr", "loop.alarms.mismatch.threshold", "coach.timeout_s", "coach.budget.usd", "train.lora.alpha"} <= set(names)
    for name in names:
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"{name}={value}"])
        (line,) = [part for part in str(caught.value).splitlines() if part.startswith(f"  {name}: must be a finite number")]
        assert line.rpartition("not ")[2].strip("'-.").lower() in ("inf", "nan", "1e400")


def test_what_is_allowed_in_place_of_an_infinity_is_said():
    said = {
        "train.gamma=.nan": "train.gamma: must be a finite number at least 0 and at most 1, not nan",
        "train.lr=.inf": "train.lr: must be a finite number above 0, not inf",
        "train.iterations=.inf": "train.iterations: must be a finite number at least 0, not inf",
        "train.lora.alpha=.inf": "--set: 1 setting(s) can't be used:\n  train.lora.alpha: must be a finite number above 0, not inf",
        "coach.timeout_s=inf": "coach.timeout_s: must be a finite number above 0, not 'inf'",
    }
    for override, line in said.items():
        with pytest.raises(ConfigError, match=re.escape(line)):
            load_config(None, [override])
    with pytest.raises(ConfigError, match="beta: must be a finite number above 0, not inf"):
        make_offline_config({"method": "dpo", "beta": float("inf")})


def test_overrides_are_yaml_and_win(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train: {iterations: 3, lr: 1.0e-4}\nenvironment: {options: {levels: [1]}}\n")
    config = load_config(path, ["train.lr=1e-3", "environment.options.levels=[1, 2]", "coach.when=episode"])
    assert (config.train.iterations, config.train.lr, config.coach.when) == (3, 1e-3, "episode")
    assert config.environment.options == {"levels": [1, 2]}


@pytest.mark.parametrize(("text", "part"), [("train: [", "not valid YAML"), ("- a", "holds a list")])
def test_a_broken_file_is_said_to_be_broken(tmp_path, text, part):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_config(path)


def test_a_missing_file_and_a_bad_override_are_named(tmp_path):
    with pytest.raises(ConfigError, match="can't read config"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"not of the form key\.path=value"):
        load_config(None, ["train.lr"])
    with pytest.raises(ConfigError, match="there is no config 'demmo'"):
        find("demmo")


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "c.yaml"
    config = make_config({"train": {"lr": 0.001}, "model": {"a": "tiny"}})
    path.write_text(config.dump())
    assert load_config(path) == config


@pytest.mark.parametrize("name", names())
def test_built_in_configs_are_valid(name):
    assert isinstance(load_config(find(name)), RunConfig)


def test_a_config_without_discounted_credit_is_read_back_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(make_config({"train": {"credit": "own"}}).dump())
    assert load_config(path).same_training(make_config({"train": {"credit": "own"}})) == []


def test_a_resumed_run_may_grow_but_not_change():
    one, two = make_config({"train": {"iterations": 3}}), make_config({"train": {"iterations": 9}, "gateway": {"port": 8123}})
    assert one.same_training(two) == []
    assert one.same_training(make_config({"train": {"lr": 0.5, "iterations": 3}})) == ["train.lr"]


LLM = {"kind": "llm", "model": "openai:judge"}


@pytest.mark.parametrize(
    ("coach", "said"),
    [
        ({"kind": "llm"}, "needs coach.model as 'provider:model'"),
        ({"kind": "llm", "model": "judge"}, r"got 'judge'"),
        ({"model": "openai:judge"}, "coach.model: no effect with coach.kind 'evidence'"),
        ({"kind": "a:b", "reasks": 1, "cache": "x"}, "coach.reasks, coach.cache: no effect"),
        ({**LLM, "promt": "x"}, "did you mean 'prompt'"),
        ({**LLM, "budget": {"call": 3}}, r"coach\.budget\.call: unknown setting; did you mean 'calls'"),
        (
            {**LLM, "prices": {"openai:judge": {"input": 1, "output": 2, "cached": 0}}},
            r"cached: unknown setting; known here: input, output",
        ),
        ({**LLM, "prices": {"openai:other": {"input": 1, "output": 2}}}, "no price of coach.model 'openai:judge'"),
        ({**LLM, "budget": {"usd": 3}}, "coach.budget.usd needs coach.prices"),
        ({**LLM, "model_options": {"api_key": "sk-1"}}, "environment variable"),
        ({**LLM, "actions_per_call": 3}, "it is for 'episode'"),
        ({**LLM, "timeout_s": 120}, r"may take 1800 s"),
        ({"evidence": "bound"}, "no effect with coach.kind 'evidence'"),
        ({"kind": "outcome", "when": "episode", "evidence": "first"}, "no effect with coach.kind 'outcome'"),
        ({"unit": "transition", "when": "generated"}, "unit 'transition' can't take effect"),
        ({"calibrate": "batch"}, "'none', 'stratum' or 'running'"),
    ],
)
def test_a_coachs_settings_that_can_not_be_meant_are_refused(coach, said):
    with pytest.raises(ConfigError, match=said):
        make_config({"coach": coach})


def test_a_verdict_gets_the_time_that_an_llms_tries_may_need():
    assert make_config({}).coach.verdict_s == 120
    coach = make_config({"coach": {**LLM, "reasks": 1, "retries": 2, "request_timeout_s": 20, "max_wait_s": 10}}).coach
    assert coach.verdict_s == 2 * 3 * (20 + 30)
    assert make_config({"coach": {**LLM, "timeout_s": 1800}}).coach.verdict_s == 1800


def test_a_resumed_run_may_raise_its_budget_and_not_change_its_judge():
    one = make_config({"coach": LLM})
    more = {**LLM, "budget": {"calls": 9, "usd": 1}, "prices": {"openai:judge": {"input": 1, "output": 2}}, "retries": 1, "timeout_s": 9e3}
    assert one.same_training(make_config({"coach": more})) == []
    assert one.same_training(make_config({"coach": {**LLM, "model": "openai:other"}})) == ["coach.model"]


def test_an_llm_coach_is_written_and_read_back(tmp_path):
    config = make_config({"coach": {**LLM, "prices": {"openai:judge": {"input": 1, "output": 2}}, "budget": {"usd": 1}}})
    (tmp_path / "c.yaml").write_text(config.dump())
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"evaluate": {"samples": 4, "temperature": 0}}, "greedy samples are all the same"),
        ({"evaluate": {"samples": 4, "pass_at": [1, 8]}}, r"pass_at 8 is not in 1\.\.4"),
        ({"evaluate": {"samples": 4, "pass_at": [0]}}, r"pass_at 0 is not in 1\.\.4"),
        ({"evaluate": {"best_by": "majority"}}, "needs evaluate.samples above 1"),
        ({"evaluate": {"samples": 4, "best_by": "pass@3"}}, r"'pass@3' is not among evaluate\.pass_at \[1, 4\]"),
        ({"evaluate": {"best_by": "score", "best_is": "min"}}, "would keep the worst checkpoint"),
        ({"loop": {"max_staleness": 2}}, "no effect without loop.pipeline"),
        ({"loop": {"pipeline": True, "max_staleness": 0}}, "greater than or equal to 1"),
        ({"loop": {"curriculum": "difficulty"}}, "needs loop.curriculum_iterations"),
        ({"loop": {"curriculum_iterations": 3}}, "no effect with loop.curriculum 'none'"),
        ({"loop": {"frozen": ["a", "a"]}}, "loop.frozen names one twice: a, a"),
        ({"loop": {"trackers": ["wandb", "wandb"]}}, "loop.trackers names one twice"),
        ({"loop": {"trackers": ["comet"]}}, "'tensorboard', 'wandb', 'trackio' or 'mlflow'"),
        ({"loop": {"project": "x"}}, "no effect without loop.trackers"),
        ({"loop": {"trackers": ["wandb"], "project": "../x"}}, "loop.project"),
        ({"loop": {"early_stop": {"min_delta": 0.1}}}, r"loop\.early_stop\.patience"),
        ({"loop": {"early_stop": {"patience": 1}}, "evaluate": {"every": 0}}, "early_stop can't take effect with evaluate.every 0"),
        ({"loop": {"alarms": {"entropy_colapse": {}}}}, "did you mean 'entropy_collapse'"),
        ({"loop": {"alarms": {"mismatch": {"action": "panic"}}}}, r"loop\.alarms\.mismatch\.action"),
        ({"loop": {"alarms": {"entropy_collapse": {"threshold": 2}}}}, "share of the first entropy"),
        ({"loop": {"alarms": {"ratio_explosion": {"threshold": 0.9}}}}, "ratio_explosion.threshold must be above 1"),
    ],
)
def test_settings_of_the_loop_that_can_not_be_meant_are_refused(data, said):
    with pytest.raises(ConfigError, match=said):
        make_config(data)


def test_an_alarm_that_is_given_in_part_keeps_its_own_defaults(tmp_path):
    config = make_config({"loop": {"alarms": {"entropy_collapse": {"action": "stop"}}, "early_stop": {"patience": 3}}})
    assert (config.loop.alarms.entropy_collapse.threshold, config.loop.alarms.entropy_collapse.action) == (0.1, "stop")
    assert config.loop.alarms.length_drift.threshold == 3.0
    path = tmp_path / "c.yaml"
    path.write_text(config.dump())
    assert load_config(path) == config


def test_a_resumed_run_may_change_what_watches_it_and_not_what_trains_it():
    one = make_config({})
    watching = {"alarms": {"mismatch": {"threshold": 1}}, "early_stop": {"patience": 1}, "trackers": ["wandb"], "project": "p"}
    assert one.same_training(make_config({"loop": {**watching, "keep_refused": 9}})) == []
    assert one.same_training(make_config({"loop": {"pipeline": True, "frozen": ["a"]}})) == ["loop.frozen", "loop.pipeline"]


def test_pass_at_defaults_to_one_and_all_samples():
    assert make_config({"evaluate": {"samples": 4}}).evaluate.ks == (1, 4) and make_config({}).evaluate.ks == ()
    assert make_config({"evaluate": {"samples": 4, "pass_at": [2, 1, 2]}}).evaluate.ks == (1, 2)

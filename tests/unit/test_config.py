"""Settings: mistakes are named, with the way out; nothing is ignored."""

import pytest

from mappa_graph.config import RunConfig, load_config, make_config
from mappa_graph.configs import find, names
from mappa_graph.errors import ConfigError


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

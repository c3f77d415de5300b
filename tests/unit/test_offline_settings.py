"""Settings of a training from traces: defaults by method, and an error for what can't take effect."""

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.sections.offline import OfflineConfig
from mappa_graph.trainers.offline import make_offline_config


@pytest.mark.parametrize(
    ("method", "whole", "adapter"), [("sft", 2e-5, 2e-4), ("dpo", 1e-6, 1e-5), ("kto", 1e-6, 1e-5), ("reinforce", 1e-6, 1e-4)]
)
def test_the_learning_rate_goes_by_the_method_and_by_what_is_trained(method, whole, adapter):
    assert make_offline_config({"method": method}).rate == whole
    assert make_offline_config({"method": method, "lora": {"rank": 4}}).rate == adapter
    assert make_offline_config({"method": method, "lr": 0.5}).rate == 0.5


def test_sft_takes_good_actions_and_the_others_take_all():
    assert make_offline_config({"method": "sft"}).least_score == 7.0
    assert make_offline_config({"method": "sft", "min_score": 0}).least_score == 0.0
    assert make_offline_config({"method": "reinforce"}).least_score is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "ppo"}, "method: Input should be"),
        ({"method": "sft", "clip": 0.1, "gamma": 0.1}, "gamma, clip: no effect with method 'sft'; of use with reinforce"),
        ({"method": "dpo", "good": 8}, "good: no effect with method 'dpo'; of use with kto"),
        ({"method": "kto", "min_score": 5}, "min_score: no effect with method 'kto'; of use with sft, reinforce"),
        ({"method": "kto", "good": 3, "bad": 3}, "bad 3 is not below good 3"),
        ({"heldout": 0, "salt": "x"}, "salt has no effect with heldout 0"),
        ({"heldout": 1}, "heldout: Input should be less than 1"),
        ({"lora": {"rnk": 3}}, "lora.rnk: unknown setting"),
        ({"epochs": 0, "seeds": 1}, "2 setting"),
    ],
)  # fmt: skip
def test_what_cannot_take_effect_is_an_error_that_names_it(settings, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        make_offline_config(settings)


def test_every_setting_survives_being_written_down():
    made = make_offline_config({"method": "kto", "lora": {"rank": 4}, "good": 8, "since": "2026-01-01"})
    plain = made.model_dump(mode="json", exclude_unset=True)
    assert OfflineConfig(**plain) == made

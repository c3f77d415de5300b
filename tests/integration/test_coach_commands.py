"""A run with an LLM as its coach, over real HTTP, and the commands that score, validate and give out what a run's store holds."""

import json
import zlib
from pathlib import Path

import pytest

from mappa_graph import TraceStore
from mappa_graph.cli import main
from mappa_graph.errors import CoachError, ConfigError
from mappa_graph.record import Verdict
from mappa_graph.trainers import train
from mappa_graph.trainers.checkpoint import load_latest
from tests.fakes.coach_cases import verdicts_json
from tests.fakes.openai_coach import Act, CoachServer, error, verdict
from tests.fakes.team import settings, team
from tests.fakes.tinymodel import make_tiny_model

TEAM = {"name": "tests.fakes.team:team"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.05)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("COLUMNS", "200")


def score_of(text: str) -> float:
    """What the scripted judge thinks: fixed by the case."""
    return zlib.crc32(text.encode()) % 8 + 1


def judge(body):
    text = body["messages"][-1]["content"]
    last = text.strip().splitlines()[-1]
    if last.startswith("Score these actions: "):
        return Act(verdicts_json(*((n, score_of(text + n)) for n in last.removeprefix("Score these actions: ").rstrip(".").split(", "))))
    return verdict(score_of(text), better_action="a plain and short note")


@pytest.fixture
def server():
    with CoachServer([judge]) as running:
        yield running


def llm(server, **more):
    options = {"base_url": server.url}
    return {"kind": "llm", "model": "openai:judge", "model_options": options, "when": "completed", "reasks": 0, "retries": 0, **more}


def cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def verdicts(run: Path) -> dict[str, Verdict]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return {id: v for t in store.traces(split="train") for id, v in t.verdicts.items()}


PRICES = {"openai:judge": {"input": 1.0, "output": 10.0}}


@pytest.mark.parametrize(
    ("when", "unit", "calls"),
    [("completed", "action", 2), ("episode", "action", 1), ("completed", "transition", 2), ("episode", "transition", 1)],
)
def test_an_llm_coaches_a_run_and_what_it_cost_an_episode_is_told(model, server, tmp_path, when, unit, calls):
    run = tmp_path / "r"
    summary = train(team(), settings(run, model, train={"iterations": 1}, coach=llm(server, when=when, unit=unit, prices=PRICES)))
    assert (summary["coach"]["scored"], summary["coach"]["unscored"]) == (12, 0)
    assert len(server.requests) == summary["coach"]["calls"] == 6 * calls
    each = summary["coach"]["per_episode"]
    assert each["calls"] == calls and each["tokens"] == calls * 120 and each["usd"] == pytest.approx(calls * 300e-6)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["coach"]["calls"] == 6 * calls and row["coach"]["by_stratum"].keys() <= {"even", "odd"}
    page = (run / "report.html").read_text()
    assert "What scoring costs" in page and f"while training, {when}" in page and "openai:judge" in page
    assert {v.coach.split("@")[0] for v in verdicts(run).values()} == {"openai:judge"}


@pytest.mark.parametrize(("evidence", "name"), [("bound", "bounded(openai:judge)"), ("first", "cascade")])
def test_evidence_may_bound_an_llm_or_be_asked_before_it(model, server, tmp_path, evidence, name):
    summary = train(team(), settings(tmp_path / "r", model, train={"iterations": 1}, coach=llm(server, evidence=evidence)))
    assert summary["coach"]["name"] == name
    assert all(v.coach.startswith(name) and v.score is not None for v in verdicts(tmp_path / "r").values())


def test_a_coach_that_can_not_be_made_stops_a_run_before_it_leaves_anything(model, server, tmp_path):
    with pytest.raises(ConfigError, match="can't read the coach's prompt"):
        train(team(), settings(tmp_path / "r", model, coach=llm(server, prompt="no/such.txt")))
    assert not (tmp_path / "r").exists()


def test_a_run_whose_coach_was_down_is_scored_later_and_goes_on(model, tmp_path, capsys):
    down = True
    with CoachServer([lambda body: error(503) if down else judge(body)]) as server:
        run = tmp_path / "r"
        config = settings(run, model, train={"iterations": 1}, coach=llm(server), environment=TEAM)
        with pytest.raises(CoachError, match=r"no verdict on 12 of 12 actions[^\n]*\n.*mappa-graph coach .*/r`"):
            train(team(), config)
        with pytest.raises(CoachError, match="12 of 12"):
            train(team(), config)
        down = False
        assert cli("coach", run, "--set", "coach.budget.calls=5", "-s", "coach.concurrency=1") == 0
        said = capsys.readouterr().out
        assert "5 scored, 7 without a score; 12 actions were pending in 6 episodes" in said and "7 x the budget" in said
        asked = len(server.requests)
        assert cli("coach", run) == 0
        assert "7 scored, 0 without a score; 7 actions were pending" in capsys.readouterr().out
        assert len(server.requests) - asked == 7
        assert cli("coach", run) == 0
        assert "0 actions were pending" in capsys.readouterr().out
        summary = train(team(), config)
    assert (summary["iterations"], summary["coach"]["scored"], summary["coach"]["unscored"]) == (1, 12, 0)
    assert "later, completed" in (run / "report.html").read_text()


@pytest.fixture(scope="module")
def scored(model, tmp_path_factory):
    """A run scored by its outcome, whose store can be judged by other coaches."""
    run = tmp_path_factory.mktemp("runs") / "scored"
    train(team(), settings(run, model, train={"iterations": 1}, environment=TEAM))
    return run


def with_llm(server, **more):
    flat = {**llm(server, **more)}
    return [x for k, v in flat.items() for x in ("--set", f"coach.{k}={json.dumps(v)}")]


def test_the_times_of_scoring_can_be_compared_by_what_they_cost(scored, server, capsys):
    for when, calls in (("episode", 1), ("completed", 2)):
        assert cli("coach", "score", scored, "--again", *with_llm(server, when=when)) == 0
        assert f"an episode: {calls}.00 calls" in capsys.readouterr().out
    assert cli("report", scored) == 0
    page = (scored / "report.html").read_text()
    assert "later, episode" in page and "later, completed" in page


def test_a_coach_is_validated_against_labels_itself_and_order(scored, server, tmp_path, capsys):
    before = verdicts(scored)
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(json.dumps({"action": id, "score": i % 11, "blame": []}) + "\n" for i, id in enumerate([*before, "gone"])))
    assert cli("coach", "validate", scored, "--labels", labels, *with_llm(server)) == 0
    said = capsys.readouterr().out
    assert "against labels   12 actions" in said and "against itself   12 actions: 0.00 points apart" in said
    assert "order            10 actions" in said and "1 of 13 labels are of actions that are not here" in said
    found = json.loads((scored / "coach-validation.json").read_text())
    assert found["agreement"]["n"] == 12 and found["self_agreement"]["difference"] == 0 and found["position"]["difference"] > 0
    assert verdicts(scored) == before
    assert cli("coach", "validate", scored, "--labels", labels, "--stored") == 0
    assert "against itself" not in capsys.readouterr().out
    assert len(server.requests) == 12 + 2 * 12 + 2 * 5


def test_a_sample_is_labelled_by_hand_and_what_is_not_filled_in_is_no_label(scored, tmp_path, capsys):
    path = tmp_path / "labels.jsonl"
    assert cli("coach", "sample", scored, "-n", 5, "--out", path) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5 and {row["action"] for row in rows} <= verdicts(scored).keys()
    assert all(row["agent"] in ("drafter", "editor") and row["score"] is None for row in rows)
    path.write_text("".join(json.dumps({**row, "score": None if i else 6}) + "\n" for i, row in enumerate(rows)))
    assert cli("coach", "validate", scored, "--labels", path, "--stored") == 0
    assert "against labels   1 actions" in capsys.readouterr().out


def test_better_actions_are_given_out_as_lines(scored, server, tmp_path, capsys):
    assert cli("coach", scored, "--again", "-q", *with_llm(server)) == 0
    capsys.readouterr()
    assert cli("coach", "better", scored) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 12 and {row["chosen"] for row in rows} == {"a plain and short note"}
    assert all(row["prompt"][-1]["role"] == "user" and row["rejected"] != row["chosen"] for row in rows)
    assert cli("coach", "better", scored, "--below", 5, "--out", tmp_path / "b.jsonl") == 0
    kept = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert kept == [row for row in rows if row["score"] < 5] and 0 < len(kept) < 12


def test_a_store_without_a_config_is_coached_with_the_agents_it_shows(scored, server, tmp_path, capsys):
    (tmp_path / "trace.db").write_bytes((scored / "trace.db").read_bytes())
    assert cli("coach", tmp_path / "trace.db", "--again", *with_llm(server)) == 0
    said = capsys.readouterr()
    assert "12 scored" in said.out and "environment 'notes'" in said.err
    assert "editor" in server.said_to(0)


def test_a_coach_may_be_named_for_one_pass(scored, capsys):
    assert cli("coach", scored, "--again", "--coach", "evidence") == 0
    assert {v.coach.split("@")[0] for v in verdicts(scored).values()} == {"evidence"}
    assert cli("coach", scored, "--again", "--coach", "outcome") == 0
    assert {v.coach for v in verdicts(scored).values()} == {"outcome"}
    assert "12 scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothere"], "holds no recorded run"),
        (["RUN", "--coach", "evidence", "--model", "openai:judge"], "name two coaches"),
        (["RUN", "--model", "judge"], "needs coach.model as 'provider:model'"),
        (["RUN", "--set", "coach.whne=episode"], "did you mean 'when'"),
        (["validate", "RUN", "--stored"], "add --labels FILE"),
        (["validate", "RUN", "--labels", "nothere.jsonl"], "can't read the labels"),
        (["validate", "RUN", "--iteration", "99"], "holds no such episode"),
        (["better", "RUN", "--out", "no/such/folder.jsonl"], "can't write"),
    ],
)
def test_a_users_mistake_with_the_coach_gets_a_message(scored, capsys, arguments, said):
    assert cli("coach", *(str(scored) if a == "RUN" else a for a in arguments)) == 1
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", [[], ["score"], ["validate"], ["sample"], ["better"]])
def test_each_command_shows_an_example(capsys, command):
    assert cli("coach", *command, "--help") == 0
    assert "Example: mappa-graph coach" in capsys.readouterr().out


class Unfair:
    """Scores what was asked in tasks of an even number three points higher."""

    name = "unfair"

    async def score(self, case):
        return Verdict(score_of(case.output) * 0.6 + 3.0 * (case.stratum == "even"))


def test_calibration_reaches_the_weights_and_goes_on_after_a_stop_as_if_there_had_been_none(model, tmp_path):
    def go(name, calibrate, iterations):
        more = {"coach": {"kind": "evidence", "when": "completed", "calibrate": calibrate}, "rollout": {"tasks": 6, "samples": 1}}
        return train(team(), settings(tmp_path / name, model, train={"iterations": iterations}, **more), coach=Unfair())

    go("stopped", "running", 1)
    go("stopped", "running", 3)
    summary = go("whole", "running", 3)
    go("plain", "none", 3)

    def state(name):
        _, extra = load_latest(tmp_path / name / "checkpoints")
        return extra["calibration"], [row["agents"]["drafter"]["return_mean"] for row in extra["history"] if row["agents"]]

    assert state("stopped")[0] == state("whole")[0]
    assert state("stopped")[1] == pytest.approx(state("whole")[1])  # sums over threads come in any order
    assert set(state("whole")[0]["sums"]) == {"even", "odd"}
    assert state("plain")[0]["sums"] == {}
    assert state("plain")[1] != pytest.approx(state("whole")[1])
    first, last = summary["coach"]["mean_by_stratum_first"], summary["coach"]["mean_by_stratum_last"]
    assert first["even"] - first["odd"] > 1 and last["even"] - last["odd"] > 1  # as the coach gave them


def test_calibration_without_strata_is_refused_before_anything_runs(model, tmp_path):
    from mappa_graph import Task

    flat = team(tasks=[Task(f"t{i}", f"{i}: ") for i in range(40)])
    with pytest.raises(ConfigError, match="can't take effect: all training tasks have the stratum"):
        train(flat, settings(tmp_path / "r", model, coach={"calibrate": "stratum"}))
    assert not (tmp_path / "r").exists()

from __future__ import annotations

from mappa_graph.agent import Agent
from mappa_graph.record import Action, Episode, EpisodeTrace, Execution, FileChange
from mappa_graph.sandboxes import Ledger

TEAM = [
    Agent("engineer", reads=["train.csv"], writes=["X_train.pkl", "X_test.pkl"]),
    Agent("modeler", reads=["X_train.pkl"], writes=["model.pkl"]),
    Agent("analyst", reads=["model.pkl", "notes.md"], writes=["submission*.csv"]),
]


def did(*changes: tuple[str, str]) -> Execution:
    return Execution(id="e", status="ok", files=tuple(FileChange(path, change) for path, change in changes))  # type: ignore[arg-type]


def test_first_and_last_writer_are_known() -> None:
    ledger = Ledger(TEAM)
    ledger.record("engineer", "a1", did(("X_train.pkl", "created")))
    ledger.record("modeler", "a2", did(("X_train.pkl", "changed"), ("model.pkl", "created")))
    first, last = ledger.first("X_train.pkl"), ledger.last("X_train.pkl")
    assert first is not None and last is not None
    assert (first.agent, first.action) == ("engineer", "a1")
    assert (last.agent, last.action) == ("modeler", "a2")
    assert ledger.first("nothing") is None


def test_a_missing_artifact_is_owed_by_who_declared_it() -> None:
    ledger = Ledger(TEAM)
    ledger.record("engineer", "a1", did(("X_train.pkl", "created")))
    assert ledger.missing() == {"X_test.pkl": ("engineer",), "model.pkl": ("modeler",), "submission*.csv": ("analyst",)}
    blame = ledger.who_owed("X_test.pkl")
    assert blame.agents == ("engineer",)
    assert "declared to write it" in blame.reason
    assert ledger.who_owed("submission_2.csv").agents == ("analyst",)


def test_a_deleted_artifact_is_on_who_deleted_it() -> None:
    ledger = Ledger(TEAM)
    ledger.record("engineer", "a1", did(("X_train.pkl", "created")))
    ledger.record("analyst", "a2", did(("X_train.pkl", "deleted")))
    blame = ledger.who_owed("X_train.pkl")
    assert (blame.agents, blame.actions) == (("analyst",), ("a2",))
    assert "X_train.pkl" in ledger.missing()


def test_a_file_nobody_declared_is_on_nobody() -> None:
    blame = Ledger(TEAM).who_owed("notes.md")
    assert blame.agents == ()
    assert blame.reason == "analyst declared to read it, but nobody declared to write it"


def test_a_broken_file_is_on_its_last_writer_and_says_whose_it_was() -> None:
    ledger = Ledger(TEAM)
    ledger.record("modeler", "a1", did(("model.pkl", "created")))
    ledger.record("analyst", "a2", did(("model.pkl", "changed")))
    blame = ledger.who_broke("model.pkl")
    assert (blame.agents, blame.actions) == (("analyst",), ("a2",))
    assert "modeler made it" in blame.reason
    assert "modeler's to write" in blame.reason


def test_files_of_the_host_are_on_no_agent() -> None:
    ledger = Ledger(TEAM)
    ledger.given({"train.csv": 10})
    assert ledger.who_broke("train.csv").agents == ()
    assert ledger.present == {"train.csv"}


def test_a_ledger_is_rebuilt_from_a_trace_in_the_order_of_actions() -> None:
    def action(order: int, agent: str, change: str) -> Action:
        return Action(f"a{order}", "t", agent, agent, order, executions=(did(("model.pkl", change)),))

    trace = EpisodeTrace(Episode("e"), actions=(action(1, "analyst", "changed"), action(0, "modeler", "created")))
    last = Ledger.of(trace, TEAM).last("model.pkl")
    assert last is not None
    assert last.agent == "analyst"

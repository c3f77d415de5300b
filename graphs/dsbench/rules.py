"""What good and bad work look like in this pipeline: rules for the `EvidenceCoach`, beside its own.

The coach's own rules know of runs, errors and declared files; these know what the files must hold. They read it from the `[workspace]` line
that the desk put beside each run (`box.py`), and the grade of a submission, where the coach may know it, from the `[grade]` line. A fault
is blamed on the agent that made it. An agent that was stopped by another's fault, in a way that the coach's own rules would take for
its own, gets no verdict at all: leaving an action out is better than teaching from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mappa_graph.coach.base import Case
from mappa_graph.coach.evidence import Finding
from mappa_graph.coach.facts import blocked, missing_outputs
from mappa_graph.record import Execution

from .box import GRADE, SUBMISSION, WORKSPACE
from .text import says_done

X_TRAIN, Y_TRAIN, X_TEST, MODEL = "X_train.pkl", "y_train.pkl", "X_test.pkl", "model.pkl"
_DATA = (".pkl", ".pickle", ".joblib", ".csv", ".npy", ".npz", ".parquet")
_NO_MODEL = re.compile(r"^(?:numpy\.|pandas\.|builtins\.(?:str|int|float|bool|NoneType|set|bytes)$)")
_ESTIMATOR = re.compile(r"\b(\w*(?:Classifier|Regressor|Regression|SVC|SVR|NB)|Ridge|Lasso|ElasticNet)\(")
_CLASSIFIES = re.compile(r"Classifier$|^LogisticRegression$|SVC$|NB$")
_UNFIT = re.compile(
    r"feature.{0,40}(?:names|expecting|mismatch|shape)|inconsistent numbers of samples|columns? .{0,40}missing", re.IGNORECASE
)


@dataclass
class Known:
    """What the looks at the files have shown up to some point of the episode."""

    task: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name -> the latest look at it."""
    by: dict[str, str] = field(default_factory=dict)
    """Name -> the agent that wrote it last."""

    def add(self, agent: str, executions: Sequence[Execution]) -> None:
        for execution in executions:
            for change in execution.files:
                self.files.pop(change.path, None)
                self.by[change.path] = agent
            said = noted(execution, WORKSPACE)
            self.task = said.get("task") or self.task
            self.files.update({str(look.get("name")): look for look in said.get("files", ())})

    def shape(self, name: str) -> tuple[int, ...] | None:
        shape = self.files.get(name, {}).get("shape")
        return tuple(shape) if shape and all(isinstance(n, int) for n in shape) else None

    def columns(self, name: str) -> list[str] | None:
        columns = self.files.get(name, {}).get("columns")
        return list(map(str, columns)) if columns else None


def noted(execution: Execution, what: str) -> dict[str, Any]:
    """The JSON of one of the lines in an execution's note; empty where there is none."""
    for line in execution.note.splitlines():
        if line.startswith(what):
            try:
                said = json.loads(line[len(what) :])
            except ValueError:
                return {}
            return said if isinstance(said, dict) else {}
    return {}


def known(case: Case, *, own: bool = True) -> Known:
    """What was known when the action began, or (`own`) once its code had run."""
    found = Known()
    for step in case.before:
        found.add(step.agent, step.executions)
    if own:
        found.add(case.agent, case.executions)
    return found


def written(case: Case) -> list[str]:
    """Files that this action left changed."""
    return [change.path for change in case.files_after if change.change != "deleted"]


# --- the Data Engineer's files ---------------------------------------------------------------------------------------------


def target_in_features(case: Case) -> Finding | None:
    """A target is a column of the features: at most 1."""
    leaked = _held(case, lambda task: task.get("targets", ()))
    if not leaked:
        return None
    return Finding(f"leaks the target into the features: {leaked}", delta=-6.0, ceiling=1.0, blame=(case.agent,))


def id_in_features(case: Case) -> Finding | None:
    """The id is a column of the features, so a model is trained on it: at most 2."""
    kept = _held(case, lambda task: [task["id"]] if task.get("id") else ())
    if not kept:
        return None
    return Finding(f"leaves the id among the features: {kept}", delta=-5.0, ceiling=2.0, blame=(case.agent,))


def files_that_dont_fit(case: Case) -> list[Finding]:
    """X_train, y_train and X_test against each other and against the task's files: each mismatch at most 2."""
    mine = {X_TRAIN, Y_TRAIN, X_TEST} & set(written(case))
    if not mine:
        return []
    return [
        Finding(problem, delta=-4.0, ceiling=2.0, blame=(case.agent,)) for names, problem in mismatches(known(case)) if mine & set(names)
    ]


def mismatches(at: Known) -> list[tuple[tuple[str, ...], str]]:
    """What about the handed-on files can't work, with the names of the files."""
    found: list[tuple[tuple[str, ...], str]] = []
    x, y, test = at.shape(X_TRAIN), at.shape(Y_TRAIN), at.shape(X_TEST)
    if x and y and x[0] != y[0]:
        found.append(((X_TRAIN, Y_TRAIN), f"{X_TRAIN} has {x[0]} rows, {Y_TRAIN} has {y[0]}"))
    if x and test and len(x) == len(test) == 2 and x[1] != test[1]:
        found.append(((X_TRAIN, X_TEST), f"{X_TRAIN} has {x[1]} columns, {X_TEST} has {test[1]}"))
    elif x and test and at.columns(X_TRAIN) and at.columns(X_TEST) and at.columns(X_TRAIN) != at.columns(X_TEST):
        found.append(((X_TRAIN, X_TEST), f"{X_TRAIN} and {X_TEST} don't have the same columns in the same order"))
    rows = at.task.get("test_rows")
    if test and isinstance(rows, int) and test[0] != rows:
        found.append(((X_TEST,), f"{X_TEST} has {test[0]} rows, test.csv has {rows}"))
    return found


# --- any file --------------------------------------------------------------------------------------------------------------


def unreadable(case: Case) -> Finding | None:
    """A declared artifact of its own can't be loaded in a fresh kernel: at most 2."""
    at = known(case)
    broken = [name for name in written(case) if _owes(case, name) and at.files.get(name, {}).get("error")]
    if not broken:
        return None
    why = str(at.files[broken[0]]["error"])[:160]
    return Finding(f"wrote {broken[0]} so that it can't be loaded: {why}", delta=-4.0, ceiling=2.0, blame=(case.agent,))


def other_name(case: Case) -> Finding | None:
    """What it owes is missing, and it saved data under a name that nobody knows of: at most 2."""
    owed = missing_outputs(case)
    if not owed or blocked(case):
        return None
    names = [name for card in case.team for name in (*card.reads, *card.writes)]
    strange = [
        change.path
        for change in case.files_after
        if change.change == "created" and change.path.lower().endswith(_DATA) and not any(fnmatchcase(change.path, name) for name in names)
    ]
    if not strange:
        return None
    return Finding(f"saved {', '.join(strange[:4])}, but owes {', '.join(owed)}", delta=-2.0, ceiling=2.0, blame=(case.agent,))


def task_file_changed(case: Case) -> Finding | None:
    """Changed or deleted a file that came with the task: at most 2."""
    made = {name for card in case.team for name in card.writes}
    given = {name for card in case.team for name in card.reads if name not in made} | {"sample_submission.csv", "description.txt"}
    touched = [change.path for change in case.files_after if change.path in given]
    if not touched:
        return None
    return Finding(f"changed {', '.join(touched)}, which came with the task", delta=-4.0, ceiling=2.0, blame=(case.agent,))


# --- the Modeler -----------------------------------------------------------------------------------------------------------


def no_model(case: Case) -> Finding | None:
    """model.pkl holds no model, or one for the other kind of task: at most 2."""
    problem = unfit_model(known(case)) if MODEL in written(case) else ""
    return Finding(problem, delta=-4.0, ceiling=2.0, blame=(case.agent,)) if problem else None


def unfit_model(at: Known) -> str:
    """What is wrong with what model.pkl holds, judged by its type and by the estimators that its text names; "" where nothing shows."""
    look = at.files.get(MODEL, {})
    kind = str(look.get("type", ""))
    if kind and _NO_MODEL.match(kind):
        return f"{MODEL} holds a {kind}, which predicts nothing"
    task = at.task.get("kind")
    estimators = _ESTIMATOR.findall(f"{kind.rsplit('.', 1)[-1]}() {look.get('head', '')}")
    if task not in ("classification", "regression") or not estimators:
        return ""
    fits = any(bool(_CLASSIFIES.search(name)) == (task == "classification") for name in estimators)
    return "" if fits else f"{MODEL} holds a {estimators[0]}, and the task is {task}"


# --- the Analyst -----------------------------------------------------------------------------------------------------------


def submission_form(case: Case) -> Finding | None:
    """The submission's columns and number of rows: at most 2, unless the rows are those of a wrong X_test, which is its writer's fault."""
    if SUBMISSION not in written(case):
        return None
    at = known(case)
    columns, task = at.columns(SUBMISSION), at.task
    due = [task["id"], *task["targets"]] if task.get("id") and task.get("targets") else None
    if columns and due and sorted(columns) != sorted(due) and len(due) < 40:
        return Finding(
            f"{SUBMISSION} has the columns {', '.join(columns[:8])}, due are {', '.join(due)}", -5.0, None, 2.0, blame=(case.agent,)
        )
    shape, rows, handed = at.shape(SUBMISSION), task.get("test_rows"), at.shape(X_TEST)
    if shape and isinstance(rows, int) and shape[0] != rows:
        what = f"{SUBMISSION} has {shape[0]} rows, test.csv has {rows}"
        writer = at.by.get(X_TEST, "")
        if handed and handed[0] == shape[0] and writer not in ("", case.agent):
            return Finding(f"{what}, as has the {X_TEST} that it was given", floor=4.0, ceiling=5.0, blame=(writer,))
        return Finding(what, delta=-5.0, ceiling=2.0, blame=(case.agent,))
    return None


def labels_for_probabilities(case: Case) -> Finding | None:
    """Whole numbers where probabilities are asked for: at most 4. Such a submission can be graded, and says less than the model knows."""
    if SUBMISSION not in written(case):
        return None
    at = known(case)
    dtypes = at.files.get(SUBMISSION, {}).get("dtypes", {})
    whole = [name for name in at.task.get("targets", ()) if str(dtypes.get(name, "")).startswith(("int", "uint", "bool"))]
    if at.task.get("form") != "probability" or not whole:
        return None
    return Finding(f"hands in labels of {', '.join(whole)}, and probabilities are asked for", delta=-3.0, ceiling=4.0, blame=(case.agent,))


def submission_grade(case: Case) -> Finding | None:
    """What it handed in, graded, where the coach may know: a submission that can't be graded at most 2; one that can, by its value."""
    grades = [grade for grade in (noted(execution, GRADE) for execution in case.executions) if grade]
    if not grades:
        return None
    grade = grades[-1]
    if not grade.get("success"):
        if submission_form(case) is not None:
            return None
        at = known(case)
        problem, writer = unfit_model(at), at.by.get(MODEL, "")
        if problem and writer not in ("", case.agent):
            return Finding(f"the submission can't be graded: {problem}", floor=4.0, ceiling=5.0, blame=(writer,))
        return Finding(f"the submission can't be graded: {str(grade.get('reason', ''))[:200]}", -5.0, None, 2.0, blame=(case.agent,))
    value = grade.get("value")
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return Finding("the submission can be graded", floor=7.0)
    return Finding(f"the submission was graded {value:.2f}", delta=2.0 * value - 1.0, floor=6.0)


# --- anyone's turn ---------------------------------------------------------------------------------------------------------


def same_code(case: Case) -> Finding | None:
    """Runs the very code of an earlier turn of its own again: at most 1, unless another's missing file stops it."""
    now = [_squeezed(execution.code) for execution in case.executions]
    earlier = {_squeezed(e.code) for step in case.before if step.agent == case.agent for e in step.executions}
    if not now or not all(code in earlier for code in now) or blocked(case):
        return None
    return Finding("ran the same code again", delta=-4.0, ceiling=1.0, blame=(case.agent,))


def prose(case: Case) -> Finding | None:
    """Words and no code while it owes files: at most 2."""
    if case.executions or case.tool_calls or not case.card.writes or blocked(case):
        return None
    owed = missing_outputs(case)
    if not owed or not case.output:
        return None
    return Finding(f"wrote words and no code that runs, and owes {', '.join(owed)}", delta=-4.0, ceiling=1.5, blame=(case.agent,))


def quits(case: Case) -> Finding | None:
    """Says that it is done while what it owes is missing: at most 1.5."""
    owed = missing_outputs(case)
    if not owed or not says_done(case.output) or blocked(case):
        return None
    return Finding(f"says that it is done, and owes {', '.join(owed)}", delta=-3.0, ceiling=1.5, blame=(case.agent,))


def looks_answers_up(case: Case) -> Finding | None:
    """Imports a package that holds a built-in task's source table: at most 0."""
    from .builtin import looks_up_source

    source = next((found for e in case.executions if (found := looks_up_source(e.code))), None)
    if source is None:
        return None
    return Finding(f"imports {source}, which is where the answers could be looked up", ceiling=0.0, blame=(case.agent,))


def others_fault(case: Case) -> Finding | None:
    """Its code failed on files that another agent wrote wrongly, in this turn or its last: no verdict, the writer has its own."""
    runs = case.executions or next((step.executions for step in reversed(case.before) if step.agent == case.agent), ())
    last = runs[-1] if runs else None
    if last is None or last.status != "error" or last.error is None:
        return None
    at = known(case, own=False)
    said = f"{last.error.message}\n{last.error.traceback[-2000:]}"
    for name, look in at.files.items():
        writer = at.by.get(name, "")
        if look.get("error") and writer not in ("", case.agent) and name in last.code:
            return Finding(f"{name}, written by {writer}, can't be loaded", void=True, blame=(writer,))
    for names, problem in mismatches(at):
        writers = {at.by.get(name, "") for name in names} - {""}
        if writers and case.agent not in writers and _UNFIT.search(said):
            return Finding(f"{problem}: the fault of {', '.join(sorted(writers))}", void=True, blame=tuple(sorted(writers)))
    return None


RULES = (
    target_in_features,
    id_in_features,
    files_that_dont_fit,
    unreadable,
    other_name,
    task_file_changed,
    no_model,
    submission_form,
    labels_for_probabilities,
    submission_grade,
    same_code,
    prose,
    quits,
    looks_answers_up,
    others_fault,
)
"""For `EvidenceCoach(extra=RULES)`."""


def _held(case: Case, names: Callable[[Mapping[str, Any]], Sequence[str]]) -> str:
    """Which of the task's special columns the feature files that this action wrote hold, in words."""
    at = known(case)
    special = set(names(at.task))
    held = {
        path: [name for name in at.files.get(path, {}).get("holds", ()) if name in special]
        for path in written(case)
        if path in (X_TRAIN, X_TEST)
    }
    return "; ".join(f"{path} has {', '.join(columns)}" for path, columns in held.items() if columns)


def _owes(case: Case, name: str) -> bool:
    return any(fnmatchcase(name, declared) for declared in case.card.writes)


def _squeezed(code: str) -> str:
    return re.sub(r"\s+", " ", code).strip()

"""Recipes: short names that stand for code, some right and some faulty.

A model of a million parameters can't write a data pipeline, but it can choose one: in the "compact" style an agent says `use features`,
and the graph runs the code that the name stands for. The scripted teams (`scripted.py`) take their code from here too. Each faulty recipe
has one fault of the kind that real agents make; neither graph nor coach looks at a recipe's name, only at what its code does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .facts import Facts

_NAMED = re.compile(r"^\s*use ([a-z][a-z ]{0,40}?)\s*$")

_READ = """\
import pandas as pd

train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
id_column = pd.read_csv("sample_submission.csv", nrows=1).columns[0]
targets = [c for c in train.columns if c not in test.columns]
"""
_ENCODE = """\
def encode(frame):
    parts = {}
    for name in names:
        column, seen = frame[name], train[name]
        if pd.api.types.is_numeric_dtype(seen):
            parts[name] = pd.to_numeric(column, errors="coerce").fillna(seen.median())
            continue
        dates = pd.to_datetime(seen, errors="coerce", format="%Y-%m-%d")
        if dates.notna().mean() > 0.9:
            moment = pd.to_datetime(column, errors="coerce", format="%Y-%m-%d").fillna(dates.median())
            parts[name + "_day"] = (moment - pd.Timestamp("1970-01-01")).dt.days
            parts[name + "_of_year"] = moment.dt.dayofyear
            continue
        for value in seen.value_counts().index[:20]:
            parts[f"{name}={value}"] = (column == value).astype(int)
    return pd.DataFrame(parts, index=frame.index)
"""
_SAVE_X = 'encode(train).to_pickle("X_train.pkl")\nencode(test).to_pickle("X_test.pkl")\n'
_SAVE_Y = 'train[targets].squeeze("columns").to_pickle("y_train.pkl")\n'
_SAY_X = 'print("features:", len(names), "rows:", len(train), len(test))\n'
_NAMES = "names = [c for c in test.columns if c != id_column]\n"


def _features(names: str = _NAMES, save: str = _SAVE_X + _SAVE_Y) -> str:
    return _READ + names + _ENCODE + save + _SAY_X


_LOAD = """\
import pickle

import pandas as pd

X, y = pd.read_pickle("X_train.pkl"), pd.read_pickle("y_train.pkl")
"""
_FIT = """\
from sklearn.ensemble import RandomForest{kind}

model = RandomForest{kind}(n_estimators=40, min_samples_leaf=2, random_state=0)
model.fit(X, y)
"""
_DUMP = """\
with open("{name}", "wb") as file:
    pickle.dump(model, file)
print("fitted on", X.shape)
"""


def _model(kind: str, name: str = "model.pkl") -> str:
    return _LOAD + _FIT.format(kind=kind) + _DUMP.format(name=name)


_PREDICT = """\
import pickle

import numpy as np
import pandas as pd

with open("model.pkl", "rb") as file:
    model = pickle.load(file)
X = pd.read_pickle("X_test.pkl")
test, sample = pd.read_csv("test.csv"), pd.read_csv("sample_submission.csv", nrows=1)
id_column, targets = sample.columns[0], list(sample.columns[1:])
"""
_VALUES: Mapping[str, str] = {
    "labels": "values = np.asarray(model.predict(X)).reshape(len(X), -1)\n",
    "numbers": "values = np.asarray(model.predict(X)).reshape(len(X), -1)\n",
    "scores": "values = np.asarray(model.predict_proba(X))[:, -1:]\n",
}
_SUBMIT = """\
out = pd.DataFrame(values, columns={columns})
out.insert(0, {id}, test[id_column])
out.to_csv("submission.csv", index=False)
print(out.head())
"""


def _submit(values: str, columns: str = "targets", id: str = "id_column") -> str:
    return _PREDICT + _VALUES[values] + _SUBMIT.format(columns=columns, id=id)


CATALOGUE: Mapping[str, Mapping[str, str]] = {
    "data_engineer": {
        "features": _features(),
        "no test": _features(save='encode(train).to_pickle("X_train.pkl")\n' + _SAVE_Y),
        "other names": _features(
            save='encode(train).to_pickle("train_features.pkl")\nencode(test).to_pickle("test_features.pkl")\n'
            'train[targets].squeeze("columns").to_pickle("labels.pkl")\n'
        ),
        "with id": _features(
            names="names = list(test.columns)\ntrain[id_column] = train[id_column].astype(str).str.extract(r'(\\d+)')[0].astype(int)\n"
            "test[id_column] = test[id_column].astype(str).str.extract(r'(\\d+)')[0].astype(int)\n"
        ),
        "with target": _features(
            save='X_train, X_test = encode(train), encode(test)\nX_train[targets[0]] = train[targets[0]].astype("category").cat.codes\n'
            'X_test[targets[0]] = 0\nX_train.to_pickle("X_train.pkl")\nX_test.to_pickle("X_test.pkl")\n' + _SAVE_Y
        ),
        "look": _READ + 'print(train.head())\nprint(train.dtypes)\nprint("id:", id_column, "targets:", targets)\n',
    },
    "modeler": {
        "classifier": _model("Classifier"),
        "regressor": _model("Regressor"),
        "other name": _model("Classifier", "forest.pkl"),
        "crash": _LOAD + 'X = X[["feature_that_is_not_there"]]\n' + _FIT.format(kind="Classifier") + _DUMP.format(name="model.pkl"),
        "look": _LOAD + "print(X.describe())\nprint(y.describe())\n",
    },
    "analyst": {
        "labels": _submit("labels"),
        "scores": _submit("scores"),
        "numbers": _submit("numbers"),
        "other columns": _submit("labels", '[f"prediction_{i}" for i in range(values.shape[1])]', '"row"'),
        "half": _submit("labels").replace('out.to_csv("submission.csv"', 'out.head(len(out) // 2).to_csv("submission.csv"'),
        "look": _PREDICT + _VALUES["labels"] + "print(values[:5])\n",
    },
}
"""Agent -> recipe -> code."""


def expand(agent: str, text: str) -> str | None:
    """The code that an agent's `use NAME` stands for; None where it says anything else, or names what the agent has not."""
    found = _NAMED.match(text)
    return CATALOGUE.get(agent, {}).get(found[1]) if found else None


def right(agent: str, facts: Facts) -> str:
    """The recipe that suits the task."""
    if agent == "data_engineer":
        return "features"
    if agent == "modeler":
        return "regressor" if facts.get("kind") == "regression" else "classifier"
    return {"number": "numbers", "probability": "scores"}.get(facts.get("form", "label"), "labels")

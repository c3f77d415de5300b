"""What the built-in tasks are made of: sixteen, from tables that ship inside PyPI packages, so that nothing is downloaded.

Eight are for training and eight held out, half of each classification and half regression. A data set that serves two tasks serves them
in one split only, so that held-out tasks show tables that training never did. A recipe says what is predicted and how it is graded;
`builtin` makes files and answers of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

SOURCES = ("sklearn.datasets", "statsmodels.datasets", "vega_datasets", "palmerpenguins", "mappa_graph")
"""Packages that the tables, and the recipes, come from. They may be installed where a sandbox's kernel runs, too: code that imports one of
them looks answers up, which a coach should be told."""


@dataclass(frozen=True)
class Recipe:
    """A task before it is made. `load` gives the whole table with its targets; the other fields are said in `builtin`."""

    name: str
    split: Literal["train", "heldout"]
    kind: Literal["classification", "regression"]
    title: str
    targets: tuple[str, ...]
    metric: str
    load: Callable[[], pd.DataFrame]
    positive: str | None = None
    """Of a binary target: the label that F1 and probabilities are about."""
    id_column: str = "id"
    id_prefix: str = ""
    """With a prefix ids are texts such as "P-20417", without one integers."""
    rows: int = 1400
    masked: Mapping[str, float] = field(default_factory=dict)
    """Which share of a column's values is blanked out."""
    notes: Mapping[str, str] = field(default_factory=dict)


def source_folders() -> list[Path]:
    """The folders with the source tables and with this package: what a sandbox that can hide folders must hide, so that answers can't be
    looked up. The packages stay importable without them, this one aside."""
    places = (
        ("sklearn", "datasets/data"),
        *(("statsmodels", f"datasets/{name}") for name in _STATSMODELS),
        ("vega_datasets", "_data"),
        ("palmerpenguins", "data"),
        ("mappa_graph", "."),
    )
    out = []
    for package, inner in places:
        spec = importlib.util.find_spec(package)
        roots = spec.submodule_search_locations if spec is not None else None
        out += [Path(root, inner).resolve() for root in roots or ()]
    return [folder for folder in dict.fromkeys(out) if folder.is_dir()]


_STATSMODELS = ("anes96", "fair", "grunfeld", "randhie")


def _statsmodels(name: str) -> pd.DataFrame:
    return importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data.copy()


def _vega(name: str) -> pd.DataFrame:
    return getattr(importlib.import_module("vega_datasets").local_data, name)().copy()


def _penguins() -> pd.DataFrame:
    return importlib.import_module("palmerpenguins").load_penguins()


def _breast_cancer() -> pd.DataFrame:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    frame = data.frame.rename(columns=lambda c: str(c).replace(" ", "_"))
    return frame.assign(malignant=1 - frame.pop("target"))


def _wine() -> pd.DataFrame:
    from sklearn.datasets import load_wine

    frame = load_wine(as_frame=True).frame
    return frame.rename(columns={"target": "cultivar", "od280/od315_of_diluted_wines": "od280_od315"})


def _weather() -> pd.DataFrame:
    frame = _vega("seattle_weather")
    return frame.assign(date=frame["date"].dt.strftime("%Y-%m-%d"))


def _weather_kind() -> pd.DataFrame:
    return _weather()[["date", "precipitation", "temp_max", "temp_min", "wind", "weather"]]


def _temperatures() -> pd.DataFrame:
    return _weather()[["date", "precipitation", "wind", "weather", "temp_max", "temp_min"]]


def _diabetes() -> pd.DataFrame:
    from sklearn.datasets import load_diabetes

    return load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "progression"})


def _investment() -> pd.DataFrame:
    frame = _statsmodels("grunfeld")
    return frame[["firm", "year", "value", "capital", "invest"]].astype({"year": int})


def _doctor_visits() -> pd.DataFrame:
    frame = _statsmodels("randhie").rename(columns={"mdvis": "visits"})
    return frame.astype({"visits": int})[[c for c in frame.columns if c != "visits"] + ["visits"]]


def _digits() -> pd.DataFrame:
    from sklearn.datasets import load_digits

    data = load_digits()
    import pandas as pd

    frame = pd.DataFrame(data.data.astype(int), columns=[f"pixel_{i}" for i in range(64)])
    return frame.assign(digit=data.target)


def _vote() -> pd.DataFrame:
    frame = _statsmodels("anes96").drop(columns="logpopul")
    frame = frame.rename(columns={"selfLR": "self_left_right", "ClinLR": "clinton_left_right", "DoleLR": "dole_left_right"})
    return frame.drop(columns="PID").assign(vote=frame["vote"].map({0.0: "Clinton", 1.0: "Dole"}))


def _affairs() -> pd.DataFrame:
    frame = _statsmodels("fair")
    return frame.assign(long_affair=(frame.pop("affairs") > 4).astype(int))


def _cars() -> pd.DataFrame:
    frame = _vega("cars").rename(columns=str.lower)
    return frame.assign(year=frame["year"].dt.strftime("%Y-%m-%d"))


def _car_origin() -> pd.DataFrame:
    frame = _cars().drop(columns="name")
    return frame[[c for c in frame.columns if c != "origin"] + ["origin"]]


def _car_mileage() -> pd.DataFrame:
    frame = _cars()
    return frame[[c for c in frame.columns if c != "miles_per_gallon"] + ["miles_per_gallon"]]


def _stocks() -> pd.DataFrame:
    frame = _vega("stocks")
    return frame.assign(date=frame["date"].dt.strftime("%Y-%m-%d"))


def _barley() -> pd.DataFrame:
    return _vega("barley").rename(columns={"yield": "bushels"})[["variety", "site", "year", "bushels"]]


def _petals() -> pd.DataFrame:
    frame = _vega("iris").rename(
        columns={"sepalLength": "sepal_length", "sepalWidth": "sepal_width", "petalLength": "petal_length", "petalWidth": "petal_width"}
    )
    return frame[["sepal_length", "sepal_width", "species", "petal_length", "petal_width"]]


_WEATHER = {"precipitation": "mm", "temp_max": "degrees Celsius", "temp_min": "degrees Celsius", "wind": "m/s"}

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "penguins",
        "train",
        "classification",
        "Tell a penguin's species from its measurements and where it was seen.",
        ("species",),
        "accuracy",
        _penguins,
        id_column="penguin",
        id_prefix="P-",
    ),
    Recipe(
        "breast-cancer",
        "train",
        "classification",
        "Tell whether a tumour is malignant (1) or benign (0) from measurements of its cells.",
        ("malignant",),
        "roc_auc",
        _breast_cancer,
        positive="1",
    ),
    Recipe(
        "wine",
        "train",
        "classification",
        "Tell which of three cultivars a wine was made from, by chemical analysis.",
        ("cultivar",),
        "f1_macro",
        _wine,
        id_column="sample_no",
        masked={"malic_acid": 0.08, "ash": 0.05, "proline": 0.1},
    ),
    Recipe(
        "seattle-weather",
        "train",
        "classification",
        "Tell what weather a day in Seattle had. The kinds are far from equally frequent.",
        ("weather",),
        "balanced_accuracy",
        _weather_kind,
        id_column="day",
        notes=_WEATHER,
    ),
    Recipe(
        "diabetes",
        "train",
        "regression",
        "Predict how far diabetes progresses within a year.",
        ("progression",),
        "rmse",
        _diabetes,
        id_column="patient",
        masked={"bmi": 0.06, "s5": 0.1},
        notes={"sex": "1 or 2", "bp": "mean blood pressure", "s1": "s1 to s6 are blood serum measurements"},
    ),
    Recipe(
        "seattle-temperature",
        "train",
        "regression",
        "Predict a day's highest and lowest temperature in Seattle: two targets.",
        ("temp_max", "temp_min"),
        "mcrmse",
        _temperatures,
        id_column="day",
        notes=_WEATHER,
    ),
    Recipe(
        "investment",
        "train",
        "regression",
        "Predict a firm's gross investment in a year, in millions of dollars.",
        ("invest",),
        "mae",
        _investment,
        id_column="record",
        id_prefix="F",
        notes={"value": "market value of the firm", "capital": "value of plant and equipment"},
    ),
    Recipe(
        "doctor-visits",
        "train",
        "regression",
        "Predict how often a person sees a doctor in a year.",
        ("visits",),
        "rmsle",
        _doctor_visits,
        id_column="person",
        rows=1200,
        notes={
            "lncoins": "log of the coinsurance rate",
            "idp": "whether there is a deductible",
            "physlm": "physical limitation",
            "disea": "number of chronic diseases",
            "hlthg": "health is good",
            "hlthf": "health is fair",
            "hlthp": "health is poor",
        },
    ),
    Recipe(
        "digits",
        "heldout",
        "classification",
        "Read a handwritten digit from its 8 x 8 pixels.",
        ("digit",),
        "accuracy",
        _digits,
        id_column="image",
        rows=1000,
        notes={"pixel_0": "grey values, row by row"},
    ),
    Recipe(
        "vote",
        "heldout",
        "classification",
        "Tell whom a voter chose in the United States in 1996 (Dole is the positive label).",
        ("vote",),
        "f1",
        _vote,
        positive="Dole",
        id_column="voter",
        masked={"income": 0.08, "TVnews": 0.05},
        notes={
            "popul": "population of the place, in thousands",
            "self_left_right": "1 very liberal to 7 very conservative",
            "TVnews": "days a week",
        },
    ),
    Recipe(
        "affairs",
        "heldout",
        "classification",
        "Tell whether a person spends much time in an affair (1) or not (0). Few do.",
        ("long_affair",),
        "log_loss",
        _affairs,
        positive="1",
        id_column="answer_no",
        notes={"rate_marriage": "1 very poor to 5 very good", "religious": "1 not to 4 strongly"},
    ),
    Recipe(
        "car-origin",
        "heldout",
        "classification",
        "Tell which part of the world a car comes from.",
        ("origin",),
        "f1_macro",
        _car_origin,
        id_column="car",
        id_prefix="C",
    ),
    Recipe(
        "car-mileage",
        "heldout",
        "regression",
        "Predict how many miles a car drives on a gallon.",
        ("miles_per_gallon",),
        "mae",
        _car_mileage,
        id_column="car",
        id_prefix="C",
        masked={"weight_in_lbs": 0.05},
    ),
    Recipe(
        "stocks",
        "heldout",
        "regression",
        "Predict the price of a share on a day.",
        ("price",),
        "mape",
        _stocks,
        id_column="quote_no",
    ),
    Recipe(
        "barley",
        "heldout",
        "regression",
        "Predict the yield of a field of barley, in bushels an acre.",
        ("bushels",),
        "r2",
        _barley,
        id_column="plot",
    ),
    Recipe(
        "iris-petals",
        "heldout",
        "regression",
        "Predict the length and the width of an iris petal: two targets.",
        ("petal_length", "petal_width"),
        "mcrmse",
        _petals,
        id_column="flower",
        masked={"sepal_width": 0.1},
        notes={"sepal_length": "cm", "sepal_width": "cm", "petal_length": "cm", "petal_width": "cm"},
    ),
)

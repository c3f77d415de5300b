"""The built-in DSBench tasks: balanced, varied, the same every time, learnable from their files, and silent about their answers."""

import io
import json
import subprocess
import sys

import pandas as pd
import pytest
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

from mappa_graph.environment import Environment, Task
from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.graphs.dsbench import builtin, recipes
from mappa_graph.graphs.dsbench.answers import resolve
from mappa_graph.graphs.dsbench.competition import find
from mappa_graph.graphs.dsbench.describe import column_table
from mappa_graph.graphs.dsbench.grading import grade_submission
from mappa_graph.graphs.dsbench.tasks import FILES, load_tasks, sandbox_files

EVERY = load_tasks(split="all")
by_task = pytest.mark.parametrize("task", EVERY, ids=lambda t: t.id)


def tables(task: Task) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    files = sandbox_files(task)
    return tuple(pd.read_csv(io.BytesIO(files[name])) for name in ("train.csv", "test.csv", "sample_submission.csv"))


def recipe_of(task: Task) -> recipes.Recipe:
    return next(r for r in recipes.RECIPES if task.id == f"builtin/{r.name}")


def test_both_splits_hold_as_many_classification_as_regression_tasks_and_share_none():
    train, heldout = load_tasks(split="train"), load_tasks(split="heldout")
    for split in (train, heldout):
        assert len(split) == 8
        assert [t.stratum for t in split].count("classification") == 4
        assert {t.stratum for t in split} == {"classification", "regression"}
    assert not {t.id for t in train} & {t.id for t in heldout}
    assert {t.id for t in train} | {t.id for t in heldout} == {t.id for t in EVERY}
    assert load_tasks() == train


def test_no_table_of_a_training_task_comes_back_in_a_held_out_one():
    names = {split: [set(tables(t)[0].columns) for t in load_tasks(split=split)] for split in ("train", "heldout")}
    for seen in names["train"]:
        for held in names["heldout"]:
            assert len(seen & held) <= 1, seen & held


def test_the_tasks_hold_every_difficulty_that_real_tables_have():
    frames = {t.id: tables(t)[0] for t in EVERY}
    first = {t.id: t.data["targets"][0] for t in EVERY}
    classed = [t for t in EVERY if t.stratum == "classification"]
    assert sum(frames[t.id][first[t.id]].dtype.kind not in "if" for t in classed) >= 3, "text labels"
    assert sum(len(t.data["labels"][first[t.id]]) > 2 for t in classed) >= 4, "more than two labels"
    assert sum(len(t.data["labels"][first[t.id]]) == 2 for t in classed) >= 3, "two labels"
    assert sum(frame.isna().any().any() for frame in frames.values()) >= 6, "missing values"
    assert sum(": date" in t.prompt for t in EVERY) >= 4, "dates"
    assert sum(len(t.data["targets"]) > 1 for t in EVERY) >= 1, "several targets"
    rarest = [frames[t.id][first[t.id]].value_counts(normalize=True).min() for t in classed]
    assert sum(share < 0.1 for share in rarest) >= 2, "imbalance"
    assert sum(not str(frames[t.id][t.data["id_column"]].iloc[0]).isdigit() for t in EVERY) >= 3, "text ids"
    assert len({t.data["metric"] for t in EVERY}) >= 8
    assert {t.data["form"] for t in EVERY} == {"label", "probability", "number"}


@by_task
def test_a_task_says_what_an_agent_and_grading_need(task):
    data = task.data
    assert task.reference is None
    assert task.stratum == data["kind"] == recipe_of(task).kind
    assert find(data["metric"]) is not None
    assert set(data["files"]) == set(FILES)
    assert (data["labels"] is None) == (data["kind"] == "regression")
    for word in (*data["targets"], data["id_column"], "train.csv", "test.csv", "sample_submission.csv", "submission.csv", "better"):
        assert word in task.prompt
    train = tables(task)[0]
    for column in train.columns:
        assert column in task.prompt or column.startswith(("pixel_", "s")), column


@by_task
def test_the_files_fit_a_sandbox_and_each_other(task):
    files = sandbox_files(task)
    assert tuple(files) == FILES
    train, test, sample = tables(task)
    assert len(train) + len(test) <= 1500
    assert sum(map(len, files.values())) < 400_000
    assert 0.2 < len(test) / (len(train) + len(test)) < 0.4
    id_column = task.data["id_column"]
    ids = [*train[id_column], *test[id_column]]
    assert len(set(ids)) == len(ids)
    assert list(sample.columns) == [id_column, *task.data["targets"]]
    assert list(sample[id_column].astype(str)) == list(test[id_column].astype(str)) == list(resolve(task).ids)
    if task.data["labels"] is not None:
        target = task.data["targets"][0]
        assert set(train[target].astype(str)) == set(task.data["labels"][target]), "every label can be learned"
        assert set(resolve(task).truth[target]) == set(task.data["labels"][target]), "and every one is asked for"


@by_task
def test_the_answers_are_in_no_file_and_no_field_of_the_task(task):
    _, test, sample = tables(task)
    assert not set(test.columns) & set(task.data["targets"])
    for target in task.data["targets"]:
        assert sample[target].nunique() == 1
    answers = resolve(task)
    spoken = json.dumps({"data": dict(task.data), "prompt": task.prompt, "id": task.id}) + sandbox_files(task)["description.txt"].decode()
    shown = [one for one in answers.ids if f'"{one}"' in spoken or f" {one} " in spoken]
    assert not shown, "no test id stands in what is said of a task, let alone beside its answer"
    for column in test.columns:
        values = list(test[column].astype(str))
        for target in task.data["targets"]:
            assert values != list(answers.truth[target]), f"{column} is a copy of {target}"


@by_task
def test_neither_ids_nor_the_order_of_rows_tell_the_target(task):
    train, _, _ = tables(task)
    for target in task.data["targets"]:
        codes = train[target] if train[target].dtype.kind in "if" else train[target].astype("category").cat.codes
        numbers = train[task.data["id_column"]].astype(str).str.extract(r"(\d+)")[0].astype(int)
        assert abs(spearmanr(numbers, codes)[0]) < 0.25
        assert abs(spearmanr(range(len(codes)), codes)[0]) < 0.25


@by_task
def test_the_order_of_the_source_table_is_not_to_be_seen(task):
    source = recipe_of(task).load()
    columns = [c for c in source.columns if c not in task.data["targets"] and c not in recipe_of(task).masked][:4]
    train = tables(task)[0]
    place = {tuple(map(str, row)): i for i, row in enumerate(source[columns].itertuples(index=False))}
    found = [
        place[key]
        for key in (tuple(map(str, row)) for row in train[columns].astype(source[columns].dtypes).itertuples(index=False))
        if key in place
    ]
    assert len(found) > len(train) / 3, "the test must see where rows come from"
    assert abs(spearmanr(range(len(found)), found)[0]) < 0.25


def _submission(task: Task) -> str:
    """What a plain model makes of the files, as a good team would."""
    train, test, _ = tables(task)
    data = task.data
    features = [c for c in test.columns if c != data["id_column"]]
    for frame in (train, test):
        for column in features:
            if frame[column].dtype.kind not in "ifb" and pd.to_datetime(frame[column], errors="coerce", format="%Y-%m-%d").notna().all():
                frame[column] = pd.to_datetime(frame[column]).dt.dayofyear + pd.to_datetime(frame[column]).dt.year * 366
    texts = [c for c in features if train[c].dtype.kind not in "ifb"]
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1)
    if texts:
        train[texts], test[texts] = encoder.fit_transform(train[texts].astype(str)), encoder.transform(test[texts].astype(str))
        train[texts], test[texts] = train[texts].astype(float), test[texts].astype(float)
    out = test[[data["id_column"]]].copy()
    leaf = 20 if data["form"] == "probability" else 1  # smooth probabilities
    for target in data["targets"]:
        kind = RandomForestRegressor if data["kind"] == "regression" else RandomForestClassifier
        model = make_pipeline(SimpleImputer(), kind(n_estimators=40, min_samples_leaf=leaf, random_state=0)).fit(
            train[features], train[target]
        )
        if data["form"] == "probability":
            out[target] = model.predict_proba(test[features])[:, list(map(str, model.classes_)).index(data["positive"][target])]
        else:
            out[target] = model.predict(test[features])
    return out.to_csv(index=False)


@by_task
def test_a_plain_model_learns_every_task_from_its_files_alone(task):
    outcome = grade_submission(task, _submission(task))
    assert outcome.success, outcome.reason
    truth, ids = resolve(task).truth, resolve(task).ids
    if task.data["kind"] == "regression":
        train = tables(task)[0]
        plain = pd.DataFrame({task.data["id_column"]: ids, **{t: train[t].mean() for t in task.data["targets"]}})
    else:
        target = task.data["targets"][0]
        often = pd.Series(truth[target]).mode()[0]
        share = sum(v == task.data["labels"][target][-1] for v in truth[target]) / len(ids)
        value = share if task.data["form"] == "probability" else often
        plain = pd.DataFrame({task.data["id_column"]: ids, target: value})
    baseline = grade_submission(task, plain.to_csv(index=False))
    better = 1 if find(task.data["metric"]).higher_better else -1
    assert better * (outcome.metrics["competition"] - baseline.metrics["competition"]) > 0, (outcome.reason, baseline.reason)


@by_task
def test_the_sample_submission_handed_in_as_it_is_is_no_success(task):
    outcome = grade_submission(task, sandbox_files(task)["sample_submission.csv"])
    assert not outcome.success
    assert outcome.reason.startswith("sample_unchanged")


def test_the_same_seed_makes_the_same_files_and_another_one_others():
    before = {t.id: (sandbox_files(t), resolve(t)) for t in EVERY}
    builtin.build.cache_clear()
    again = {t.id: (sandbox_files(t), resolve(t)) for t in load_tasks(split="all")}
    assert before == again
    other = load_tasks(split="all", seed=1)
    for task in other:
        assert sandbox_files(task)["train.csv"] != before[task.id][0]["train.csv"]
        assert set(resolve(task).ids) != set(before[task.id][1].ids)
        assert grade_submission(task, None).reason.startswith("no_submission")


def test_an_environment_takes_the_tasks():
    from mappa_graph.agent import Agent

    environment = Environment(
        "x", [Agent("a")], lambda models: None, {s: load_tasks(split=s) for s in ("train", "heldout")}, grade_submission
    )
    assert len(environment.split("train")) == 8
    assert environment.graph_input(environment.split("heldout")[0])["messages"][0][1].startswith("Read a handwritten digit")


def test_an_unknown_split_and_a_foreign_task_are_errors_that_say_what_to_do():
    with pytest.raises(ConfigError, match=r"no split 'test'(.|\n)*train, heldout, all"):
        load_tasks(split="test")
    foreign = Task("mine", "?")
    for use in (sandbox_files, resolve, lambda task: grade_submission(task, "id,y\n1,2\n")):
        with pytest.raises(TaskError, match=r"'mine'(.|\n)*load_tasks"):
            use(foreign)
    with pytest.raises(TaskError, match="no built-in DSBench task 'nope'"):
        builtin.build("nope", 0)


def test_a_package_that_is_not_installed_is_named_with_the_way_out(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'palmerpenguins'", name="palmerpenguins")

    first = recipes.RECIPES[0]
    monkeypatch.setitem(builtin._BY_NAME, first.name, recipes.Recipe(**{**first.__dict__, "load": absent}))
    builtin.build.cache_clear()
    with pytest.raises(ConfigError, match=r"palmerpenguins(.|\n)*pip install 'mappa-graph\[dsbench\]'"):
        load_tasks()
    builtin.build.cache_clear()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from sklearn.datasets import load_iris", "sklearn.datasets"),
        ("import sklearn.datasets as d", "sklearn.datasets"),
        ("from sklearn import datasets", "sklearn.datasets"),
        ("import statsmodels.datasets.fair", "statsmodels.datasets"),
        ("from vega_datasets import local_data", "vega_datasets"),
        ("import palmerpenguins", "palmerpenguins"),
        ("from mappa_graph.graphs.dsbench import builtin", "mappa_graph"),
        ("from sklearn.ensemble import RandomForestClassifier", None),
        ("import statsmodels.api as sm", None),
        ("datasets = [1]", None),
    ],
)
def test_code_that_looks_answers_up_in_the_source_tables_is_recognised(code, found):
    assert builtin.looks_up_source(code) == found


WITHOUT_SOURCES = """
import sys, sklearn.datasets, vega_datasets, palmerpenguins, statsmodels.datasets
from mappa_graph.graphs.dsbench import recipes
folders = tuple(f"{folder}/" for folder in recipes.source_folders() if folder.name != "mappa_graph")
def shut(event, arguments):
    if event == "open" and str(arguments[0]).startswith(folders):
        raise FileNotFoundError(arguments[0])
sys.addaudithook(shut)
for recipe in recipes.RECIPES:
    try:
        recipe.load()
    except (OSError, ImportError, AttributeError):
        continue
    print(recipe.name)
"""


def test_no_source_table_can_be_read_where_the_folders_named_are_hidden():
    folders = recipes.source_folders()
    assert {"sklearn", "statsmodels", "vega_datasets", "palmerpenguins"} <= {p.name for f in folders for p in f.parents}
    assert "mappa_graph" in {f.name for f in folders}
    done = subprocess.run([sys.executable, "-c", WITHOUT_SOURCES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "these can still be loaded"


def test_the_column_table_is_short_for_wide_tables_and_shows_no_long_text():
    wide = pd.DataFrame(
        {f"var_{i}": [0.5, 1.5] for i in range(200)} | {f"c{chr(97 + i % 26)}{chr(97 + i // 26)}": [1, 2] for i in range(60)}
    )
    lines = column_table(wide).splitlines()
    assert lines[0] == "- var_0 … var_199 (200 columns): number, 0.5 to 1.5"
    assert lines[-1] == "- … and 21 more columns"
    assert len(lines) == 41
    text = pd.DataFrame({"essay": ["word " * 5000, "two\nlines"], "flag": [True, False], "none": [None, None], "day": ["2020-01-02", None]})
    table = column_table(text, notes={"day": "when"})
    assert max(map(len, table.splitlines())) < 120
    assert "- flag: true or false" in table
    assert "- day: date, 1 missing, 2020-01-02 to 2020-01-02 (when)" in table
    assert "- none: " in table

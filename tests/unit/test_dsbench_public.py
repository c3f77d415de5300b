"""The public DSBench layout: every missing file named, wrong lists set right and noted, and nothing of the answers let through."""

import csv
import io
import json
from collections import Counter

import pytest

from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.graphs.dsbench.answers import resolve
from mappa_graph.graphs.dsbench.grading import grade_submission, reason_name
from mappa_graph.graphs.dsbench.tasks import FILES, load_tasks, sandbox_files

PREFIX = "./data/DSBench/"


def entry(name, data_type="classification", **more):
    return {
        "prompt": f"The long story of {name}.",
        "answer": None,
        "metadata": {
            "task_id": name,
            "task_type": "data_modeling",
            "data_type": data_type,
            "train_file": f"{PREFIX}data/data_resplit/{name}/train.csv",
            "test_file": f"{PREFIX}data/data_resplit/{name}/test.csv",
            "answer_dir": f"{PREFIX}data/answers/{name}",
            "url": f"https://www.kaggle.com/competitions/{name}",
            **more,
        },
    }


def clean(metric, target, id_column="id", task_type="classification"):
    return {
        "cleaned_prompt": f"Task: predict {target}.",
        "metric": metric,
        "task_type": task_type,
        "target_column": target,
        "id_column": id_column,
    }


def table(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])


class Folder:
    """A folder as a user fills it."""

    def __init__(self, path):
        self.path, self.entries, self.prompts = path, [], {}

    def add(self, name, answers, prompt=None, *, train=None, test=None, base="data", **more):
        """A task whose answer file is `answers` (column -> values, ids first); the training file has the same columns and an `x`."""
        id_column, *targets = answers
        n = len(answers[id_column])
        train = train or {id_column: range(900, 900 + n), "x": range(n), **{t: answers[t] for t in targets}}
        test = test or {id_column: answers[id_column], "x": range(n)}
        table(self.path / base / "data_resplit" / name / "train.csv", train)
        table(self.path / base / "data_resplit" / name / "test.csv", test)
        table(self.path / base / "answers" / name / "test_answer.csv", answers)
        self.entries.append(entry(name, **more))
        if prompt:
            self.prompts[name] = prompt
        return self

    def save(self, name="dsbench_modeling_train.json", entries=None):
        entries = self.entries if entries is None else entries
        (self.path / name).write_text("".join(json.dumps(e) + "\n" for e in entries))
        if self.prompts:
            (self.path / "dsbench_modeling_cleaned_prompts.json").write_text(json.dumps(self.prompts))
        return self.path

    def load(self, **options):
        return load_tasks(self.save(), **{"split": "all", **options})


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def titanic(folder):
    return folder.add("titanic", {"PassengerId": [7, 5, 6, 8], "Survived": [1, 0, 0, 1]}, clean("accuracy", "Survived", "PassengerId"))


def truth_text(task):
    answers = resolve(task)
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow((task.data["id_column"], *task.data["targets"]))
    rows.writerows(zip(answers.ids, *answers.truth.values(), strict=True))
    return out.getvalue()


def test_a_task_of_the_public_layout_is_loaded_and_graded(titanic):
    (task,) = titanic.load()
    assert task.id == "dsbench/titanic" and task.stratum == "classification" and task.reference is None
    assert task.data["labels"] == {"Survived": ["0", "1"]} and task.data["positive"] == {"Survived": "1"}
    assert (task.data["metric"], task.data["form"], task.data["id_column"]) == ("accuracy", "label", "PassengerId")
    assert task.prompt.startswith("Task: predict Survived.\n\nMetric: accuracy; higher is better\n")
    for line in ("- x: integer, 0 to 3", "a header line PassengerId,Survived", "Survived: one of the labels 0, 1. F1 is that of 1."):
        assert line in task.prompt
    assert "long story" not in task.prompt
    outcome = grade_submission(task, "PassengerId,Survived\n5,0\n6,0\n7,1\n8,0\n")
    assert outcome.success and outcome.metrics["accuracy"] == 0.75


def test_the_sandbox_is_given_the_files_and_no_answers(titanic):
    (task,) = titanic.load()
    files = sandbox_files(task)
    assert tuple(files) == FILES
    assert files["train.csv"] == (titanic.path / "data/data_resplit/titanic/train.csv").read_bytes()
    assert files["test.csv"] == (titanic.path / "data/data_resplit/titanic/test.csv").read_bytes()
    assert files["sample_submission.csv"] == b"PassengerId,Survived\n7,0\n5,0\n6,0\n8,0\n"
    assert files["description.txt"].decode() == task.prompt + "\n"
    assert reason_name(grade_submission(task, files["sample_submission.csv"])) == "sample_unchanged"


def test_a_target_column_in_a_test_file_is_taken_out(folder):
    folder.add(
        "leaky",
        {"id": [1, 2], "y": [3.5, 4.5]},
        clean("mae", "y", task_type="regression"),
        test={"id": [1, 2], "y": [3.5, 4.5], "note": ["a, b", ""]},
    )
    (task,) = folder.load()
    assert sandbox_files(task)["test.csv"] == b'id,note\n1,"a, b"\n2,\n'


def test_a_sample_that_was_downloaded_is_never_used(titanic):
    real = titanic.path / "data/data_resplit/titanic/sample_submission.csv"
    real.write_text("PassengerId,Survived\n7,1\n5,0\n6,0\n8,1\n")
    (task,) = titanic.load()
    assert b"8,1" not in sandbox_files(task)["sample_submission.csv"]


@pytest.mark.parametrize("base", ["data", "data/DSBench/data", ".", "data_modeling/data"])
def test_the_files_are_found_wherever_below_the_folder_the_archive_was_unpacked(folder, base):
    folder.add("one", {"id": [1, 2], "y": ["a", "b"]}, clean("accuracy", "y"), base=base)
    (task,) = folder.load()
    assert grade_submission(task, "id,y\n1,a\n2,b\n").metrics["accuracy"] == 1


def test_each_missing_file_of_each_task_is_named_in_one_message(titanic):
    titanic.add("bikes", {"datetime": ["a", "b"], "count": [1, 2]}, clean("rmsle", "count", "datetime", "regression"))
    titanic.entries.append(entry("absent"))
    (titanic.path / "data/data_resplit/titanic/test.csv").unlink()
    (titanic.path / "data/answers/bikes/test_answer.csv").unlink()
    with pytest.raises(TaskError) as caught:
        titanic.load()
    said = str(caught.value)
    assert said.startswith(f"5 files of 3 DSBench tasks are missing below {str(titanic.path)!r}:\n")
    for line in (
        "titanic: data/data_resplit/titanic/test.csv",
        "bikes: data/answers/bikes/test_answer.csv",
        "absent: data/data_resplit/absent/train.csv",
        "absent: data/data_resplit/absent/test.csv",
        "absent: data/answers/absent/test_answer.csv",
    ):
        assert f"\n  {line}\n" in said
    assert 'missing="skip"' in said and "data.zip" in said


def test_tasks_that_lack_a_file_can_be_passed_over_and_are_noted(titanic):
    titanic.entries.append(entry("absent"))
    tasks = titanic.load(missing="skip")
    assert [t.id for t in tasks] == ["dsbench/titanic"]
    assert [n for n in tasks.notes if "absent" in n] == [
        "passed over, file missing: absent: data/data_resplit/absent/train.csv",
        "passed over, file missing: absent: data/data_resplit/absent/test.csv",
        "passed over, file missing: absent: data/answers/absent/test_answer.csv",
    ]


def test_nothing_left_after_passing_over_is_an_error_all_the_same(folder):
    folder.entries.append(entry("absent"))
    with pytest.raises(TaskError, match="3 files of 1 DSBench tasks"):
        folder.load(missing="skip")


# ---- lists and splits


def test_lists_may_be_lines_or_one_list_and_the_repository_s_own_will_do(titanic):
    expected = titanic.load()
    (titanic.path / "dsbench_modeling_train.json").write_text(json.dumps(titanic.entries))
    assert load_tasks(titanic.path, split="all") == expected
    (titanic.path / "dsbench_modeling_train.json").unlink()
    (titanic.path / "data.json").write_text("{'name': 'titanic', 'url': 'https://x', 'year': 2012}\n")
    assert load_tasks(titanic.path, split="all") == expected
    (titanic.path / "dsbench_modeling_cleaned_prompts.json").unlink()
    (titanic.path / "data" / "task").mkdir()
    (titanic.path / "data" / "task" / "titanic.txt").write_text("Who was saved?")
    (task,) = tasks = load_tasks(titanic.path, split="all")
    assert task.prompt.startswith("Who was saved?")
    assert task.data["metric"] == "" and "Metric: none is named" in task.prompt
    assert task.data["kind"] == "classification" and task.data["targets"] == ["Survived"]
    assert "titanic: no metric is named" in tasks.notes


def test_a_second_list_is_the_held_out_split(titanic):
    titanic.add("other", {"id": [1, 2], "y": ["a", "b"]}, clean("accuracy", "y"))
    titanic.save("dsbench_modeling_eval.json", titanic.entries[1:])
    titanic.save(entries=titanic.entries[:1])
    ids = {split: [t.id for t in load_tasks(titanic.path, split=split)] for split in ("train", "heldout", "all")}
    assert ids == {"train": ["dsbench/titanic"], "heldout": ["dsbench/other"], "all": ["dsbench/titanic", "dsbench/other"]}


def test_one_list_alone_is_split_by_kind_and_always_alike(folder):
    for i in range(20):
        kind = "regression" if i % 2 else "classification"
        values = [1.5, 2.5] if i % 2 else ["a", "b"]
        folder.add(f"t{i}", {"id": [1, 2], "y": values}, clean("mae" if i % 2 else "accuracy", "y", task_type=kind), data_type=kind)
    train, heldout = folder.load(split="train"), folder.load(split="heldout")
    assert Counter(t.stratum for t in heldout) == {"classification": 2, "regression": 2}
    assert Counter(t.stratum for t in train) == {"classification": 8, "regression": 8}
    assert sorted([*train, *heldout], key=lambda t: t.id) == sorted(folder.load(), key=lambda t: t.id)
    folder.entries.reverse()
    assert {t.id for t in folder.load(split="heldout")} == {t.id for t in heldout}


def test_lists_and_prompts_may_be_named(titanic, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("lists")
    titanic.save()
    (titanic.path / "dsbench_modeling_train.json").rename(elsewhere / "mine.jsonl")
    (titanic.path / "dsbench_modeling_cleaned_prompts.json").rename(titanic.path / "prompts.json")
    (task,) = load_tasks(titanic.path, split="all", tasks_file=elsewhere / "mine.jsonl", prompts_file="prompts.json")
    assert task.data["metric"] == "accuracy"


# ---- what the lists get wrong


def test_wrong_column_names_are_set_right_by_the_answer_file(folder):
    folder.add("titanic", {"PassengerId": [1, 2, 3], "Survived": [1, 0, 1]}, clean("accuracy", "Transported", "Passenger"))
    (task,) = tasks = folder.load()
    assert (task.data["id_column"], task.data["targets"]) == ("PassengerId", ["Survived"])
    assert task.prompt.startswith("The long story of titanic.") and "Transported" not in task.prompt
    assert [n.split(": ", 1)[1] for n in tasks.notes] == [
        "the answers have no id column 'Passenger'; 'PassengerId' is used",
        "targets read from the answer file's header: Survived",
        "its cleaned prompt speaks of other columns than its files; the original description is used",
    ]


def test_text_targets_are_never_regression(folder):
    labels = ["slim", "stout", "slim", "normal"]
    prompt = {**clean("accuracy", "NObeyesdad"), "task_type": None}
    folder.add("obesity", {"id": [1, 2, 3, 4], "NObeyesdad": labels}, prompt, data_type="regression")
    (task,) = tasks = folder.load()
    assert task.stratum == task.data["kind"] == "classification"
    assert task.data["labels"] == {"NObeyesdad": ["normal", "slim", "stout"]}
    assert any("listed as regression" in n for n in tasks.notes)
    outcome = grade_submission(task, "id,NObeyesdad\n1,slim\n2,stout\n3,slim\n4,stout\n")
    assert outcome.metrics["accuracy"] == 0.75 and "f1_macro" in outcome.metrics


def test_labels_that_only_the_training_file_has_are_known(folder):
    folder.add("x", {"id": [1, 2], "y": ["b", "a"]}, clean("accuracy", "y"), train={"id": [8, 9], "y": ["c", "c"], "x": [1, 2]})
    (task,) = folder.load()
    assert task.data["labels"] == {"y": ["a", "b", "c"]}
    assert grade_submission(task, "id,y\n1,c\n2,a\n").success


def test_every_other_column_can_be_a_target(folder):
    answers = {"qa_id": [1, 2, 3], **{f"q{i}": [0.1 * i, 0.5, 0.9] for i in range(30)}}
    folder.add("quest", answers, clean("spearman", "30_labels", "qa_id", "regression"), data_type="regression")
    (task,) = folder.load()
    assert len(task.data["targets"]) == 30
    assert "a header line qa_id and the 30 target columns" in task.prompt
    assert grade_submission(task, truth_text(task)).metrics["competition"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("metric", "answers", "form", "kind"),
    [
        ("roc_auc", {"y": ["No", "Yes", "No"]}, "probability", "classification"),
        ("roc_auc", {"a": [0, 1, 0], "b": [1, 1, 0]}, "probability", "classification"),
        ("log_loss", {"a": [0, 1, 0], "b": [1, 0, 0], "c": [0, 0, 1]}, "probabilities", "classification"),
        ("log_loss", {"y": [0, 1, 0]}, "probability", "classification"),
        ("map_at_3", {"y": ["a_b", "c", "d"]}, "ranking", "classification"),
        ("jaccard", {"y": ["so good", "bad", "it, is"]}, "text", "classification"),
        ("rmsle", {"a": [0, 1, 2], "b": [3, 4, 5]}, "number", "regression"),
        ("quadratic_weighted_kappa", {"y": [1, 2, 3]}, "label", "classification"),
        ("novel", {"y": [1, 2, 3]}, "label", "classification"),
    ],
)
def test_what_a_prediction_is_follows_from_metric_and_truth(folder, metric, answers, form, kind):
    targets = list(answers)
    prompt = clean(metric, targets if len(targets) > 1 else targets[0], task_type=kind)
    folder.add("x", {"id": [1, 2, 3], **answers}, prompt, data_type=kind)
    (task,) = tasks = folder.load()
    assert (task.data["form"], task.data["kind"]) == (form, kind)
    text = truth_text(task).replace("Yes", "1").replace("No", "0") if form == "probability" else truth_text(task)
    outcome = grade_submission(task, text)
    assert outcome.success and outcome.score == 1, outcome.reason
    assert reason_name(grade_submission(task, sandbox_files(task)["sample_submission.csv"])) == "sample_unchanged"
    assert bool(tasks.notes) == (metric == "novel")
    if metric == "novel":
        assert tasks.notes == ("x: its metric 'novel' is not known here",)
        assert "Metric: novel (not computed here" in task.prompt


def test_a_task_that_the_cleaned_prompts_leave_out_has_its_known_metric(folder):
    folder.add("liverpool-ion-switching", {"time": ["0.1", "0.2"], "open_channels": [0, 3]}, data_type="regression")
    (task,) = folder.load()
    assert (task.data["metric"], task.data["kind"], task.data["id_column"]) == ("f1_macro", "classification", "time")
    assert task.prompt.startswith("The long story")


# ---- bad folders


def test_an_unknown_split_mode_or_folder_is_an_error(titanic):
    with pytest.raises(ConfigError, match="no split 'test'"):
        titanic.load(split="test")
    with pytest.raises(ConfigError, match=r"missing is 'warn'(.|\n)*error(.|\n)*skip"):
        titanic.load(missing="warn")
    with pytest.raises(TaskError, match=r"nowhere(.|\n)*data\.zip"):
        load_tasks(titanic.path / "nowhere")
    with pytest.raises(TaskError, match=r"holds no task list(.|\n)*dsbench_modeling_train\.json"):
        load_tasks(titanic.path / "data")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        ("[]", "is empty"),
        ("[1, 2", "not valid JSON"),
        ('{"metadata": {"task_id": "a"}}\n{"metadata"', "line 2 is not valid JSON"),
        ('{"prompt": "x"}', "line 1: no usable task_id"),
        ('{"metadata": {"task_id": "../../etc/passwd"}}', "no usable task_id"),
        ('{"metadata": {"task_id": 5}}', "no usable task_id"),
        ("[7]", "row 1: no usable task_id"),
        ('{"metadata": {"task_id": "a"}}\n{"metadata": {"task_id": "a"}}', "listed twice"),
        ("__import__('os').system('true')", "line 1 is not valid JSON"),
    ],
)
def test_a_list_that_can_t_be_used_is_refused_by_row(tmp_path, text, match):
    (tmp_path / "dsbench_modeling_train.json").write_text(text)
    with pytest.raises(TaskError, match=match):
        load_tasks(tmp_path, split="all")


@pytest.mark.parametrize("text", ["[1]", "{", "\x80"])
def test_cleaned_prompts_that_can_t_be_used_are_refused(titanic, text):
    titanic.save()
    (titanic.path / "dsbench_modeling_cleaned_prompts.json").write_text(text)
    with pytest.raises(TaskError, match="cleaned prompts"):
        load_tasks(titanic.path, split="all")


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"id": [1, 1], "y": [1, 2]}, "repeats ids in its column 'id'"),
        ({"id": [], "y": []}, "holds no rows"),
        ({"id": [1, 2]}, "needs an id and a target, and has 1 columns"),
        ({"id": [1, 2, 3], "y": [1.5, 2.5, ""]}, "1 of 3 true values of DSBench task 'x' are not numbers"),
    ],
)
def test_an_answer_file_that_can_t_be_graded_by_is_refused(folder, answers, match):
    folder.add("x", answers, clean("mae", "y", task_type="regression"), data_type="regression", test={"id": [1], "x": [1]})
    with pytest.raises(TaskError, match=match):
        folder.load()


def test_files_that_have_gone_since_loading_are_an_error(titanic):
    (task,) = titanic.load()
    (titanic.path / "data/data_resplit/titanic/train.csv").unlink()
    with pytest.raises(TaskError, match=r"dsbench/titanic(.|\n)*train\.csv"):
        sandbox_files(task)


def test_a_test_file_without_the_id_column_is_noted(folder):
    folder.add("x", {"id": [1, 2], "y": ["a", "b"]}, clean("accuracy", "y"), test={"row": [1, 2], "x": [1, 2]})
    assert folder.load().notes == ("x: its test file has no id column 'id'; the ids are in sample_submission.csv alone",)

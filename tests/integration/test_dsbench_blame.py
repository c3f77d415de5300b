"""The paper's examples of blame as golden cases: each is played through the real sandbox, and scored as it happens and in hindsight.

The bands are the paper's: who caused the break 0 to 2, who was blocked by others 3 to 5, who did its job 6 or more.
"""

import pytest

from mappa_graph.coach import EvidenceCoach
from mappa_graph.gateway import Gateway
from mappa_graph.graphs import dsbench
from mappa_graph.graphs.dsbench.catalogue import CATALOGUE
from mappa_graph.graphs.dsbench.factory import PRELOAD
from mappa_graph.graphs.dsbench.scripted import Line, ScriptedEngine
from mappa_graph.rollout import Job, Runner, Sampling
from mappa_graph.sandboxes import SandboxPool
from mappa_graph.store import TraceStore

FEATURES = Line("Features and target are saved.", CATALOGUE["data_engineer"]["features"])
FIT = Line("The model is saved.", CATALOGUE["modeler"]["classifier"])
SUBMIT = Line("The submission is saved.", CATALOGUE["analyst"]["labels"])
BLOCKED, BROKE, DID_ITS_JOB = (3, 5), (0, 2), (6, 10)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(size=2, preload=PRELOAD) as pool:
        yield pool


async def play(pool, path, lines, when):
    """`lines`: agent -> what it says in each turn, the last again from then on. Gives `{agent: [verdict, ...]}`."""

    def says(agent, messages):
        turn = sum(message["role"] == "assistant" for message in messages)
        return lines[agent][min(turn, len(lines[agent]) - 1)]

    environment = dsbench.environment(sandbox=pool)
    (task,) = [task for task in environment.split("train") if task.id == "builtin/penguins"]
    with TraceStore(path / "trace.db") as store:
        async with Gateway(ScriptedEngine(says), store) as gateway:
            async with Runner(environment, gateway.url, store, when=when).open() as runner:
                (trace,) = await runner.run([Job(task)], Sampling(), EvidenceCoach(extra=environment.rules))
    assert trace.episode.status == "done", trace.episode.error
    out = {}
    for action in trace.actions:
        out.setdefault(action.agent, []).append(trace.verdicts[action.id])
    return trace, out


def code(text):
    return Line("Here is my code.", text)


def done(text):
    return Line(f"{text}\nDONE")


GOLDEN = {
    "X_test is missing: the Data Engineer": (
        {
            "data_engineer": [code(CATALOGUE["data_engineer"]["no test"]), done("All is saved.")],
            "modeler": [FIT],
            "analyst": [SUBMIT, done("X_test.pkl is missing, so there is nothing to predict.")],
        },
        "data_engineer",
        {"modeler": DID_ITS_JOB, "analyst": BLOCKED},
    ),
    "the model is missing: the Modeler": (
        {
            "data_engineer": [FEATURES],
            "modeler": [code("model = 1\nprint('fitted')"), done("The model is fitted.")],
            "analyst": [SUBMIT, done("model.pkl was never saved.")],
        },
        "modeler",
        {"data_engineer": DID_ITS_JOB, "analyst": BLOCKED},
    ),
    "both inputs are there and its own KeyError: the Analyst": (
        {
            "data_engineer": [FEATURES],
            "modeler": [FIT],
            "analyst": [code("import pandas as pd\npd.read_pickle('X_test.pkl')['no such column']"), done("It failed.")],
        },
        "analyst",
        {"data_engineer": DID_ITS_JOB, "modeler": DID_ITS_JOB},
    ),
    "both inputs are there and its own TypeError: the Analyst": (
        {
            "data_engineer": [FEATURES],
            "modeler": [FIT],
            "analyst": [code("len(5)"), code("sum(3)"), code("int([])"), code("float({})")],
        },
        "analyst",
        {"data_engineer": DID_ITS_JOB, "modeler": DID_ITS_JOB},
    ),
    "no error and no file: the Analyst wrote no saving code": (
        {
            "data_engineer": [FEATURES],
            "modeler": [FIT],
            "analyst": [code(CATALOGUE["analyst"]["look"]), done("The predictions look good.")],
        },
        "analyst",
        {"data_engineer": DID_ITS_JOB, "modeler": DID_ITS_JOB},
    ),
    "prose without code that runs: the Modeler": (
        {
            "data_engineer": [FEATURES],
            "modeler": [Line("One should use a random forest with a few hundred trees.")],
            "analyst": [SUBMIT, done("model.pkl is not there.")],
        },
        "modeler",
        {"data_engineer": DID_ITS_JOB, "analyst": BLOCKED},
    ),
    "X_train and X_test don't fit: the Data Engineer, though the Analyst's code fails": (
        {
            "data_engineer": [
                code(CATALOGUE["data_engineer"]["features"].replace('encode(test).to_pickle("X', 'encode(test).iloc[:, 1:].to_pickle("X'))
            ],
            "modeler": [FIT],
            "analyst": [SUBMIT, done("The features of the test rows are missing columns.")],
        },
        "data_engineer",
        {"modeler": DID_ITS_JOB, "analyst": None},
    ),
    "half of the test rows are handed on: the Data Engineer, though the submission is short": (
        {
            "data_engineer": [
                code(CATALOGUE["data_engineer"]["features"].replace('encode(test).to_pickle("X', 'encode(test).head(50).to_pickle("X'))
            ],
            "modeler": [FIT],
            "analyst": [code(CATALOGUE["analyst"]["labels"].replace("test[id_column]", "test[id_column].head(len(X))"))],
        },
        "data_engineer",
        {"modeler": DID_ITS_JOB, "analyst": BLOCKED},
    ),
    "a regressor for labels: the Modeler": (
        {
            "data_engineer": [FEATURES],
            "modeler": [code(CATALOGUE["modeler"]["regressor"].replace("model.fit(X, y)", 'model.fit(X, y.astype("category").cat.codes)'))],
            "analyst": [SUBMIT],
        },
        "modeler",
        {"data_engineer": DID_ITS_JOB, "analyst": BLOCKED},
    ),
    "the answers looked up in the source table: the Analyst": (
        {
            "data_engineer": [FEATURES],
            "modeler": [FIT],
            "analyst": [code("import palmerpenguins\n" + CATALOGUE["analyst"]["labels"])],
        },
        "analyst",
        {"data_engineer": DID_ITS_JOB, "modeler": DID_ITS_JOB},
    ),
}


@pytest.mark.parametrize("when", ["completed", "episode"])
@pytest.mark.parametrize("name", GOLDEN)
async def test_blame_falls_where_the_paper_says(pool, tmp_path, name, when):
    lines, culprit, bands = GOLDEN[name]
    _, given = await play(pool, tmp_path, lines, when)
    low, high = BROKE
    worst = min(given[culprit], key=lambda verdict: verdict.score)
    assert low <= worst.score <= high and culprit in worst.blame, given[culprit]
    assert when == "episode" or worst.blame == (culprit,)  # in hindsight the coach's own rule also names whose code showed the failure
    for agent, band in bands.items():
        for verdict in given[agent]:
            assert agent not in verdict.blame, verdict
            if band is None:
                assert verdict.score is None and culprit in verdict.error, verdict
            else:
                assert band[0] <= verdict.score <= band[1], verdict


async def test_an_error_that_is_put_right_in_the_next_turn_ends_well(pool, tmp_path):
    lines = {
        "data_engineer": [FEATURES],
        "modeler": [code("import pandas as pd\npd.read_pickle('X_train.pkl')['nothing']"), FIT],
        "analyst": [SUBMIT],
    }
    trace, given = await play(pool, tmp_path, lines, "completed")
    first, second = given["modeler"]
    assert first.score <= 2 and second.score >= 8 and "put its own earlier error right" in second.reason
    assert trace.episode.outcome.success


async def test_who_makes_good_for_a_missing_file_is_scored_on_what_it_did(pool, tmp_path):
    own = CATALOGUE["data_engineer"]["features"] + CATALOGUE["analyst"]["labels"]
    lines = {
        "data_engineer": [code(CATALOGUE["data_engineer"]["no test"]), done("All is saved.")],
        "modeler": [FIT],
        "analyst": [code(own)],
    }
    trace, given = await play(pool, tmp_path, lines, "completed")
    assert trace.episode.outcome.success and given["analyst"][0].score >= 8 and given["data_engineer"][-1].score <= 2

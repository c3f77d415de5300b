"""The whole way: an app in production is traced, its traces are coached and trained on, and what came of it serves it, unrestarted."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from langchain_core.tracers import LangChainTracer
from langsmith import Client

from mappa_graph.coach import AgentCard, score_pending
from mappa_graph.exchange.importer import import_traces
from mappa_graph.exchange.langsmith import LangSmithSource
from mappa_graph.exchange.writeback import LangSmithTarget, write_back
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.deployment import Deployment
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.store import TraceStore
from mappa_graph.trainers.checkpoint import trained_weights
from mappa_graph.trainers.offline import train_offline
from tests.fakes.desk import POLICY, Desk, Helpful, make_desk_model
from tests.fakes.langsmith import LangSmith

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_desk_model(tmp_path_factory.mktemp("desk") / "model")


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LANGSMITH_", "LANGCHAIN_")):
            monkeypatch.delenv(name)


async def coached(run: Path, service: LangSmith, calls: Path) -> dict[int, list[float]]:
    """Imports what LangSmith has, joins it to the gateway's tokens, coaches it, writes the scores back; scores by version."""
    client = Client(api_url=service.url, api_key="x", auto_batch_tracing=False)

    def take() -> None:
        done = import_traces(LangSmithSource("desk", run, client=client), run, calls=calls)
        assert done.text_only == 0 and not done.unknown

    await asyncio.to_thread(take)
    with TraceStore(run / "trace.db") as store:
        found = await score_pending(store, Helpful(), [AgentCard(POLICY)])
        assert found.unscored == 0
        scores = defaultdict(list)
        for trace in store.traces():
            for action in trace.actions:
                scores[trace.calls[action.id].version].append(trace.verdicts[action.id].score)
    await asyncio.to_thread(write_back, run, LangSmithTarget(client=client))
    return dict(scores)


@pytest.mark.timeout(300)
async def test_an_app_in_production_gets_better_from_its_own_traces_without_a_restart(model: Path, tmp_path: Path) -> None:
    live, production, run = tmp_path / "live", tmp_path / "production", tmp_path / "better"
    with LangSmith() as service, TraceStore(live / "trace.db") as store:
        tracing = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
        async with Gateway(LocalEngine({POLICY: model}), store) as gateway:
            deployment = Deployment(gateway, live, {POLICY: model})
            assert (await deployment.publish(POLICY, model)).version == 1
            desk = Desk(gateway.url, lambda: [LangChainTracer(client=tracing, project_name="desk")])
            workers = list(desk.workers)
            try:
                # In production, traced.
                await desk.ask(range(160))
                await asyncio.to_thread(tracing.flush, timeout=60)

                # Imported, joined, coached, trained; the app goes on meanwhile.
                first = await coached(production, service, live / "trace.db")
                assert {version: len(scores) for version, scores in first.items()} == {1: 160}
                settings = {"method": "reinforce", "lr": 3e-3, "epochs": 6, "gamma": 0.0, "heldout": 0.2}
                training = asyncio.create_task(asyncio.to_thread(train_offline, production, run, settings, models=str(live)))
                meanwhile = 0
                while not training.done():
                    await desk.ask(range(1000 + meanwhile, 1001 + meanwhile))
                    meanwhile += 1
                summary = await training
                assert meanwhile > 0
                policy = summary["policies"][POLICY]
                assert sum(policy["rows"].values()) + summary["left_out"].get("truncated", 0) == 160
                assert policy["rows"]["train"] > 80 and policy["rows"]["heldout"] > 10
                assert policy["unweighted"] == policy["retokenised"] == summary["tokens"]["retokenised"] == 0
                assert 0.99 < policy["weight_mean"] < 1.01  # the weights that served were those that the training began from
                assert policy["after"]["train"] < policy["before"]["train"]
                assert policy["estimate"]["after"] > policy["estimate"]["before"] + 0.1  # on questions that were not trained on

                # Published to a share of the calls, measured by what each version's calls were worth.
                release = await deployment.publish(POLICY, trained_weights(run, "best")[POLICY], share=0.3)
                assert (release.version, release.verified) == (2, True)
                await desk.ask(range(2000, 2200))
                await asyncio.to_thread(tracing.flush, timeout=60)
                scores = await coached(production, service, live / "trace.db")
                assert 35 <= len(scores[2]) <= 87  # 60 of 200, and four deviations to either side
                mean = {version: sum(values) / len(values) for version, values in scores.items()}
                assert mean[2] > mean[1] + 1.5, mean

                # Promoted: every call meets it.
                await deployment.promote(POLICY)
                await desk.ask(range(3000, 3020))
                assert gateway.versions() == {POLICY: 2} and gateway.trials() == {}
                assert not any(worker.done() for worker in workers) and workers == desk.workers
                served = deployment.status()
            finally:
                await desk.close()
        assert not desk.failures and served["errors"] == {}
        assert len(desk.answers) == sum(served["policies"][POLICY]["calls"].values()) == 160 + meanwhile + 200 + 20
        assert store.counts()["failures"] == 0
        assert all(1 <= call.version <= 2 for call in store.orphan_calls())
    with suppress(Exception):
        tracing.cleanup()
    # The coach's scores lie beside the traces, for whoever looks at them there.
    said = [f for f in service.feedback.values() if f["key"] == "mappa_score"]
    assert len(said) == sum(len(values) for values in scores.values())

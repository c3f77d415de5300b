"""A refused batch run again: what is not finite is named down to the tokens, and nothing in the run changes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mappa_graph.config import make_config
from mappa_graph.errors import TrainerError
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.checkpoint import save_checkpoint
from mappa_graph.trainers.guards import keep_refused
from mappa_graph.trainers.replay import MOST, replay
from mappa_graph.trainers.run import make_trainer
from tests.fakes.tinymodel import make_tiny_model

BAD = 77
"""A token whose embedding is broken in the checkpoint."""
CONFIG = make_config({"train": {"lr": 1e-3, "iterations": 2}})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.05)


def sample(name: str, prompt: list[int], completion: list[int], policy: str = "solver", ret: float = 0.3) -> Sample:
    return Sample(policy, policy, f"episode-{name}", name, tuple(prompt), tuple(completion), (-5.5,) * len(completion), ret=ret)


GOOD = [sample("a", [5, 6], [7, 8, 9], ret=0.9), sample("b", [5, 9], [7, 3], ret=0.1), sample("v", [4], [4, 5], "verifier", 0.6)]


def broken(folder: Path, value: float) -> None:
    """Puts `value` into one row of the embeddings of a checkpoint's solver."""
    path = next((folder / "policies" / "solver").glob("*.safetensors"))
    weights = load_file(path)
    weights["model.embed_tokens.weight"][BAD, 3] = value
    save_file(weights, path, metadata={"format": "pt"})


def refused_run(run: Path, model: Path, samples: list[Sample], value: float = float("nan")) -> Path:
    """A run whose solver has a broken embedding, and an update of it that was refused."""
    models = {"solver": model, "verifier": model}

    class Broken:
        def save(self, folder: Path) -> None:
            make_trainer(CONFIG, models).save(folder)
            broken(folder, value)

    save_checkpoint(run / "checkpoints", 3, Broken())
    why = {"solver": "log-probs are not finite"}
    keep_refused(run / "refused", 4, samples, why, checkpoint=3, models=models, settings=CONFIG.dump(), keep=2)
    return run


def test_the_sample_and_the_tokens_that_are_not_finite_are_named(model, tmp_path):
    late = sample("late", [5, 6], [7, BAD, 9, 9])
    done = replay(refused_run(tmp_path, model, [*GOOD, late]))
    assert (done.iteration, done.samples, done.state) == (4, 4, "of checkpoint 3, from before the update")
    assert done.then == {"solver": "log-probs are not finite"} and done.now.keys() == {"solver"}
    whole, token = done.findings
    assert whole.what == "1 of its weight tensors, the first is model.embed_tokens.weight" and whole.action == ""
    assert (token.policy, token.agent, token.episode, token.action) == ("solver", "solver", "episode-late", "late")
    assert token.what == "log-probs under its weights" and token.tokens == (2, 3), "those after the token that is broken"


def test_a_prompt_that_breaks_a_sample_breaks_all_of_its_tokens(model, tmp_path):
    done = replay(refused_run(tmp_path, model, [*GOOD, sample("early", [5, BAD], [7, 8])]))
    assert [(f.action, f.tokens) for f in done.findings[1:]] == [("early", (0, 1))]


def test_a_batch_that_is_well_again_says_so(model, tmp_path):
    done = replay(refused_run(tmp_path, model, GOOD, value=0.01))
    assert done.now == {} and done.findings == []


def test_of_many_findings_the_first_are_listed_and_the_others_counted(model, tmp_path):
    many = [sample(f"s{k}", [5, BAD], [7, 8 + k]) for k in range(MOST + 5)]
    done = replay(refused_run(tmp_path, model, many))
    assert len(done.findings) == MOST and done.more == 6  # and one about the weights


def test_a_replay_reads_the_run_and_writes_nothing(model, tmp_path):
    run = refused_run(tmp_path / "r", model, [*GOOD, sample("late", [5], [BAD, 9])])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    state = torch.get_rng_state()
    replay(run)
    torch.set_rng_state(state)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_checkpoint_or_first_weights_that_are_gone_are_named(model, tmp_path):
    import shutil

    run = refused_run(tmp_path / "r", model, GOOD)
    moved = shutil.copytree(run, tmp_path / "s")
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    with pytest.raises(TrainerError, match="checkpoint 3, from before the update, can't be used"):
        replay(run)
    about = moved / "refused" / "iteration-0004" / "refused.json"
    about.write_text(about.read_text().replace(str(model), str(tmp_path / "gone")))
    with pytest.raises(TrainerError, match=r"first weights are no longer where they were: solver: .*gone"):
        replay(moved)

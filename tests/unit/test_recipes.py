"""Every YAML block of the docs is a config that can be read."""

import re
from pathlib import Path

import pytest
import yaml

from mappa_graph.config import make_config

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_recipe_is_a_config(block):
    data = yaml.safe_load(block)
    config = make_config(data)
    for section, values in data.items():  # what is written is what is meant
        if isinstance(values, dict) and hasattr(config, section):
            assert set(values) <= set(type(getattr(config, section)).model_fields)

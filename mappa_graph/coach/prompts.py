"""Prompts of the LLM coach: text files, each version named by a hash that is stored beside every score it led to.

Files lie in `mappa_graph/coach/prompts/`; `default.txt` is the rubric (what counts, the scale, how to read a case), the others frame
it. A user's own rubric is a text file that takes the place of `default.txt`. No text of an agent is ever put into a prompt file's text;
the case is a message of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import ConfigError

_FRAMES = ("one", "episode", "json", "again", "again_episode")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The texts of one coach. `version` is eight hex digits of their hash."""

    rubric: str
    one: str
    episode: str
    json: str
    again: str
    again_episode: str
    version: str


def load_prompts(prompt: str | Path = "default") -> Prompts:
    """The prompts with a rubric of ours, by its name, or of the user's own, by the path of a text file.

    Raises `ConfigError` if there is no such rubric, or the file can't be read, or is empty.
    """
    folder = resources.files(__package__).joinpath("prompts")
    name = str(prompt)
    packaged = folder.joinpath(f"{name}.txt")
    if isinstance(prompt, str) and "/" not in name and "\\" not in name and name not in _FRAMES and packaged.is_file():
        rubric = packaged.read_text(encoding="utf-8")
    else:
        try:
            rubric = Path(prompt).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            ours = sorted(p.name[:-4] for p in folder.iterdir() if p.name.endswith(".txt") and p.name[:-4] not in _FRAMES)
            raise ConfigError(
                f"can't read the coach's prompt {name!r}: {error}",
                hint=f"give one of {', '.join(ours)}, or the path of a UTF-8 text file that holds the rubric",
            ) from error
    if not rubric.strip():
        raise ConfigError(f"the coach's prompt {name!r} is empty", hint="it must say what counts and what the scores mean")
    frames = {frame: folder.joinpath(f"{frame}.txt").read_text(encoding="utf-8").strip() for frame in _FRAMES}
    digest = hashlib.sha256("\x00".join([rubric, *frames.values()]).encode()).hexdigest()[:8]
    return Prompts(rubric=rubric.strip(), version=digest, **frames)

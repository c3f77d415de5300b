"""Settings that ship with the package: `--config demo`, `--config smollm2`, or a path of one's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..errors import ConfigError


def names() -> list[str]:
    """The built-in configs, by name."""
    return sorted(f.name.removesuffix(".yaml") for f in resources.files(__name__).iterdir() if f.name.endswith(".yaml"))


def find(name: str) -> Path:
    """The file that `--config name` means: a path that exists, or a built-in config's name."""
    path = Path(name)
    if path.exists():
        return path
    if name in names():
        return Path(str(resources.files(__name__).joinpath(f"{name}.yaml")))
    raise ConfigError(f"there is no config {name!r}", hint=f"give a YAML file, or one of: {', '.join(names())}")

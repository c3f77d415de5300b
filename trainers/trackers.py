"""Trackers by name: every row of `metrics.jsonl` also goes to TensorBoard, W&B, trackio or MLflow, through accelerate's tracker classes.

A tracker never ends a run and never holds it up: each has a thread of its own, its failures are counted, and its first one is said. A run
that is continued goes on in the same tracker's run, after the last row that it took: `trackers/ids.json` keeps both.

Where things go, unless the tracker's own environment variables say otherwise: TensorBoard and W&B's local files into the run's folder
`trackers/`, MLflow into `trackers/mlflow.db`, trackio into its own folder (TRACKIO_DIR). Keys come from the environment alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mappa_graph.config import RunConfig
from mappa_graph.errors import ConfigError

log = logging.getLogger(__name__)

EXTRAS = {"tensorboard": "trackers", "wandb": "trackers", "trackio": "trackers", "mlflow": "mlflow"}
CLOSE_S = 30.0
"""How long a run that ends waits for a tracker."""
_SECRET = re.compile(r"(^|_)key$|apikey|(^|_)token$|secret|passw|credential", re.IGNORECASE)
_PLAIN = re.compile(r"[^A-Za-z0-9_\-. /]")


def check_trackers(names: Sequence[str]) -> None:
    """Raises `ConfigError` that names the extra to install, where a tracker's library is not there."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"loop.trackers names {name}, which is not installed", hint=f"pip install 'mappa-graph[{EXTRAS[name]}]'")


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of nested data by their path: `agents/solver/kl`. Items of lists are numbered; texts and None are left out.

    Characters that not every tracker takes in a name become `_`.
    """
    out: dict[str, float] = {}
    for key, value in row.items():
        name = f"{prefix}{_PLAIN.sub('_', str(key))}"
        if isinstance(value, Mapping):
            out.update(flatten(value, f"{name}/"))
        elif isinstance(value, list | tuple):
            out.update(flatten({str(i): item for i, item in enumerate(value)}, f"{name}/"))
        elif isinstance(value, int | float) and math.isfinite(value):
            out[name] = float(value) if isinstance(value, float) else int(value)
    return out


def settings_for(config: RunConfig) -> dict[str, Any]:
    """A config as a tracker is told it: flat, plain values, and nothing whose name says that it is a secret."""

    def walk(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in data.items():
            if _SECRET.search(str(key)) and not isinstance(value, Mapping | bool | int | float):
                continue
            if isinstance(value, Mapping):
                flat.update(walk(value, f"{prefix}{key}."))
            else:
                flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
        return flat

    return walk(config.model_dump(mode="json"))


class Trackers:
    """The trackers of a run. `note(text)` says what a reader of the run should know; it may be called from any thread."""

    def __init__(self, config: RunConfig, note: Callable[[str], None]) -> None:
        names = config.loop.trackers
        self._workers: list[_Worker] = []
        self._closed = False
        if not names:
            return
        from accelerate import PartialState

        PartialState()  # its state is shared: made here once, before the threads ask for it
        folder = config.run.resolve() / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        ids = _Ids(folder / "ids.json")
        settings = settings_for(config)
        self._workers = [_Worker(name, config, folder, ids, settings, note) for name in names]

    def log(self, row: Mapping[str, Any]) -> None:
        """Hands a row of `metrics.jsonl` on; a tracker passes over one that it took before. Never raises and never waits."""
        values = flatten({key: value for key, value in row.items() if key != "iteration"})
        for worker in self._workers:
            worker.send((values, int(row["iteration"])))

    def close(self) -> None:
        """Lets the trackers finish, for a while. A second time does nothing."""
        closing, self._closed = not self._closed, True
        for worker in self._workers if closing else ():
            worker.send(None)
        for worker in self._workers if closing else ():
            worker.finish(CLOSE_S)

    def counts(self) -> dict[str, dict[str, Any]]:
        """By tracker: rows it took, failures, and the first of them as text."""
        return {w.name: {"rows": w.rows, "failures": w.failures, "first_failure": w.first} for w in self._workers}


class _Ids:
    """What is known of the trackers' runs, in a file: by tracker the `id` and the `last` iteration it took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._known: dict[str, dict[str, Any]] = {name: dict(part) for name, part in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._known = {}

    def get(self, name: str, key: str) -> Any:
        return self._known.get(name, {}).get(key)

    def put(self, name: str, **values: Any) -> None:
        with self._lock:
            self._known.setdefault(name, {}).update(values)
            aside = self._path.with_suffix(".tmp")
            aside.write_text(json.dumps(self._known))
            aside.replace(self._path)


class _Worker:
    """One tracker, in its thread: some libraries keep their current run by thread."""

    def __init__(
        self, name: str, config: RunConfig, folder: Path, ids: _Ids, settings: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        self.name = name
        self.rows = 0
        self.failures = 0
        self.first: str | None = None
        self._config, self._folder, self._ids, self._settings, self._note = config, folder, ids, settings, note
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"mappa-tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, what: tuple[dict[str, float], int] | None) -> None:
        self._queue.put(what)

    def finish(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failed(TimeoutError(f"it had not finished {timeout_s:g} s after the run"))

    def _work(self) -> None:
        tracker: Any = None
        try:
            tracker = self._start()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tracker is foreign code; a run goes on without it
            self._failed(error)
        last = self._ids.get(self.name, "last")
        while (item := self._queue.get()) is not None:
            values, step = item
            if last is not None and step <= last:
                continue
            if tracker is None:
                self.failures += 1
                continue
            try:
                tracker.log(values, step=step)
                self.rows += 1
                self._ids.put(self.name, last=step)
            except Exception as error:  # noqa: BLE001  counted, said once
                self._failed(error)
        if tracker is not None:
            try:
                tracker.finish()
            except Exception as error:  # noqa: BLE001  counted, said once
                self._failed(error)
        if self.name == "mlflow":
            _forget_mlflow(self._folder)

    def _start(self) -> Any:
        known = self._ids.get(self.name, "id")
        id = known or uuid.uuid4().hex[:12]
        tracker = _MAKE[self.name](self._config, self._folder, id)
        tracker.start()
        if known is None:
            self._ids.put(self.name, id=str(tracker.tracker.info.run_id) if self.name == "mlflow" else id)
            try:
                tracker.store_init_configuration(self._settings)
            except Exception as error:  # noqa: BLE001  rows may still be taken
                self._failed(error)
        return tracker

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.first is None:
            self.first = f"{type(error).__name__}: {error}"
            log.debug("tracker %s failed", self.name, exc_info=error)
            self._note(f"the tracker {self.name} failed ({self.first}); the run goes on without it, and metrics.jsonl has every row")


def _tensorboard(config: RunConfig, folder: Path, id: str) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("tensorboard", folder)


def _wandb(config: RunConfig, folder: Path, id: str) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    if os.environ.get("WANDB_MODE", "online") == "online" and wandb.api.api_key is None:  # it would ask for one on the terminal
        raise ConfigError("W&B has no key", hint="set WANDB_API_KEY, or `wandb login`; WANDB_MODE=offline needs none")
    quiet = wandb.Settings(silent=True, console="off")
    return WandBTracker(config.loop.project, dir=str(folder), id=id, name=config.run.name, resume="allow", settings=quiet)


def _trackio(config: RunConfig, folder: Path, id: str) -> Any:
    from accelerate.tracking import TrackioTracker

    name = f"{config.run.name}-{id}"
    return TrackioTracker(config.loop.project, name=name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)


def _mlflow(config: RunConfig, folder: Path, id: str) -> Any:
    import mlflow
    from accelerate.tracking import MLflowTracker

    if not mlflow.is_tracking_uri_set() and not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(_mlflow_uri(folder))
    known = id if len(id) == 32 else None  # ids that MLflow gave have 32 characters
    return MLflowTracker(config.loop.project, logging_dir=(folder / "mlflow").as_uri(), run_id=known, run_name=config.run.name)


def _mlflow_uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def _forget_mlflow(folder: Path) -> None:
    """Where the address was this run's own, the next run in this process must not find it set."""
    import mlflow

    if mlflow.get_tracking_uri() == _mlflow_uri(folder):
        mlflow.set_tracking_uri(None)


_MAKE: dict[str, Callable[[RunConfig, Path, str], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}

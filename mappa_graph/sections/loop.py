"""Settings of the loop around an update: order of tasks, evaluation, when to stop, alarms, trackers, checkpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Section

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class EvaluateConfig(Section):
    """Held-out evaluation: `every` iterations, before, and after."""

    every: int = Field(default=10, ge=0)
    """0: only before and after."""
    tasks: int = Field(default=200, ge=1)
    between_tasks: int | None = Field(default=None, ge=1)
    """How many tasks the evaluations between the first and the last use; None = `tasks`."""
    samples: int = Field(default=1, ge=1)
    """Episodes a task. With more than one, pass@k and the majority's vote are reported too."""
    pass_at: tuple[int, ...] | None = None
    """The k of pass@k, each at most `samples`; None = 1 and `samples`."""
    temperature: float = Field(default=0.6, ge=0)
    split: str = "heldout"
    best_by: str = "accuracy"
    """What the best checkpoint is chosen by: accuracy, score, majority, pass@K, or a metric of the environment or of its outcomes
    ("fair_f1", "classification/fair_f1")."""
    best_is: Literal["max", "min"] = "max"

    @property
    def ks(self) -> tuple[int, ...]:
        """The k that are reported; none where there is one sample a task."""
        return ks_of(self.samples, self.pass_at)

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("evaluate.samples above 1 can't take effect at evaluate.temperature 0: greedy samples are all the same")
        beyond = [k for k in self.pass_at or () if not 1 <= k <= self.samples]
        if beyond:
            raise ValueError(f"evaluate.pass_at {beyond[0]} is not in 1..{self.samples}, the number of evaluate.samples")
        if self.best_by == "majority" and self.samples == 1:
            raise ValueError("evaluate.best_by 'majority' needs evaluate.samples above 1")
        if self.best_by.startswith("pass@") and self.best_by not in {f"pass@{k}" for k in self.ks}:
            raise ValueError(f"evaluate.best_by {self.best_by!r} is not among evaluate.pass_at {list(self.ks)}")
        if self.best_is == "min" and (self.best_by in ("accuracy", "score", "majority") or self.best_by.startswith("pass@")):
            raise ValueError(f"evaluate.best_is 'min' would keep the worst checkpoint: {self.best_by} is better when it is higher")
        return self


def ks_of(samples: int, pass_at: tuple[int, ...] | None) -> tuple[int, ...]:
    """The k of pass@k for `samples` a task, sorted; empty for one sample, whose pass@1 is the accuracy."""
    if pass_at is None:
        return (1, samples) if samples > 1 else ()
    return tuple(sorted(set(pass_at)))


class CheckpointConfig(Section):
    """Checkpoints: every so many iterations, the last few and the best kept."""

    every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=2, ge=1)


class EarlyStopConfig(Section):
    """Ends a run whose held-out metric (`evaluate.best_by`) rises no more."""

    patience: int = Field(ge=1)
    """Evaluations in a row without a new best."""
    min_delta: float = Field(default=0.0, ge=0)
    """By how much a value must beat the best one to count as new best."""


class AlarmConfig(Section):
    """One alarm: it goes off when its value passes the threshold in so many iterations in a row."""

    threshold: float = Field(gt=0)
    action: Literal["off", "warn", "stop"] = "warn"
    iterations: int = Field(default=1, ge=1)


class AlarmsConfig(Section):
    """Alarms about the updates, each by agent; `trainers/guards.py` says what each looks at."""

    entropy_collapse: AlarmConfig = AlarmConfig(threshold=0.1)
    """Entropy below this share of what it was in the first update."""
    length_drift: AlarmConfig = AlarmConfig(threshold=3.0)
    """Mean length this many times longer or shorter than in the first update."""
    ratio_explosion: AlarmConfig = AlarmConfig(threshold=10.0)
    """Largest new over old probability of a token."""
    mismatch: AlarmConfig = AlarmConfig(threshold=0.3)
    """Mean difference of the engine's and the trainer's log-probs, in nats a token."""
    kl_explosion: AlarmConfig = AlarmConfig(threshold=5.0)
    """KL from the first weights, in nats a token."""
    no_signal: AlarmConfig = AlarmConfig(threshold=0.01)
    """Root mean square of the normalised advantages of every agent below this: nothing is learned."""

    @model_validator(mode="before")
    @classmethod
    def _partial(cls, data: object) -> object:
        """`{entropy_collapse: {action: stop}}` keeps that alarm's own default threshold."""
        if not isinstance(data, dict):
            return data
        own = {name: field.get_default(call_default_factory=True).model_dump() for name, field in cls.model_fields.items()}
        return {name: {**own[name], **part} if name in own and isinstance(part, dict) else part for name, part in data.items()}

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.entropy_collapse.threshold >= 1:
            raise ValueError("loop.alarms.entropy_collapse.threshold is a share of the first entropy: give a number below 1")
        for name in ("length_drift", "ratio_explosion"):
            if getattr(self, name).threshold <= 1:
                raise ValueError(f"loop.alarms.{name}.threshold must be above 1, or the alarm goes off at once")
        return self


class LoopConfig(Section):
    """How iterations follow each other."""

    pipeline: bool = False
    """The next iteration's rollouts run while training goes on, with weights one version older; corrected by the importance weight."""
    max_staleness: int = Field(default=1, ge=1)
    """With `pipeline`: actions whose weights were more versions older than the trainer's are left out, and counted as stale."""
    sampling: Literal["shuffled", "stratified"] = "shuffled"
    """How an iteration's tasks are drawn. stratified: as many of each stratum."""
    curriculum: Literal["none", "difficulty"] = "none"
    """difficulty: easy tasks first, by `Task.data["difficulty"]` or, where no task has it, by the order of strata."""
    curriculum_iterations: int | None = Field(default=None, ge=1)
    """After how many iterations the curriculum has reached all tasks."""
    early_stop: EarlyStopConfig | None = None
    frozen: tuple[str, ...] = ()
    """Agents or policies that act and are scored but don't learn, beside those with `Agent(trainable=False)`."""
    keep_refused: int = Field(default=2, ge=1)
    """How many refused batches are kept for `mappa-graph replay`, with the checkpoint before each; the oldest goes first."""
    alarms: AlarmsConfig = AlarmsConfig()
    trackers: tuple[TrackerName, ...] = ()
    project: str = Field(default="mappa-graph", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The project (or experiment) that trackers put the run in."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if not self.pipeline and self.max_staleness != 1:
            raise ValueError("loop.max_staleness has no effect without loop.pipeline")
        if self.curriculum == "none" and self.curriculum_iterations is not None:
            raise ValueError("loop.curriculum_iterations has no effect with loop.curriculum 'none'")
        if self.curriculum != "none" and self.curriculum_iterations is None:
            raise ValueError(f"loop.curriculum {self.curriculum!r} needs loop.curriculum_iterations, after which it reaches all tasks")
        for name in ("frozen", "trackers"):
            given = getattr(self, name)
            if len(set(given)) != len(given):
                raise ValueError(f"loop.{name} names one twice: {', '.join(given)}")
        if not self.trackers and self.project != "mappa-graph":
            raise ValueError("loop.project has no effect without loop.trackers")
        return self

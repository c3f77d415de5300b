"""`mappa-graph serve`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .options import ConfigOption, SetOption, interruptible, load_environment, settings_of


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    config: ConfigOption = "demo",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000,
    trained: Annotated[Path | None, typer.Option("--from", help="Serve the weights of this run instead of the first ones.")] = None,
    step: Annotated[str, typer.Option(help="Which checkpoint of it: best, last, or a number.")] = "last",
    run: Annotated[Path | None, typer.Option("--run", help="Folder whose trace.db keeps the calls.")] = None,
    overrides: SetOption = None,
) -> None:
    """Serve an environment's policies to a LangGraph app, and keep every call, until Ctrl-C.

    Example: `mappa-graph serve --config demo --from runs/demo --step best --port 8000`
    """
    from ..display import Display
    from ..gateway import Gateway
    from ..store import TraceStore
    from ..trainers.checkpoint import trained_weights
    from ..trainers.engines import make_engine
    from ..trainers.run import prepare_folder, resolve_models

    settings = settings_of(config, overrides, run, None)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-serve")})
    with interruptible():
        prepare_folder(settings)
        models = resolve_models(load_environment(settings), settings, Display())
        if trained is not None:
            models.update({p: w for p, w in trained_weights(trained, step).items() if p in models})
        with TraceStore(settings.run / "trace.db") as store:
            with Gateway(make_engine(settings, models), store, host=settings.gateway.host, port=port) as gateway:
                names = ", ".join(gateway.versions())
                Console().print(
                    f"serving {escape(names)} at [bold]{gateway.url}[/]; calls are kept in {escape(str(store.path))}; Ctrl-C ends"
                )
                threading.Event().wait()

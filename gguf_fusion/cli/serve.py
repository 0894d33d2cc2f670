"""``gguf-fusion serve``: the OpenAI interface and a page for the browser."""

from __future__ import annotations

import logging
from typing import Any

import click

from gguf_fusion.cli._ensemble import fusion_options, load_ensemble, machine_options
from gguf_fusion.cli._output import note, warn
from gguf_fusion.errors import MissingExtraError, UsageError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@fusion_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 = every network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 = any free port.")
@click.option(
    "--api-key", "api_keys", metavar="KEY", multiple=True, envvar="GGUF_FUSION_SERVE_API_KEY",
    help="A key that requests must bring (repeatable).",
)  # fmt: skip
@click.option("--alias", help="What clients call the model, instead of the ensemble's name.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(1), default=1024, show_default=True,
    help="Most pieces of a chat reply whose request names no limit.",
)  # fmt: skip
@click.option("--queue", type=click.IntRange(0), default=32, show_default=True, help="Requests that may wait.")
@click.option(
    "--max-body", type=click.FloatRange(0.001), default=8.0, show_default=True, help="Most megabytes of a request."
)
@click.option(
    "--grace", type=click.FloatRange(0), default=10.0, show_default=True,
    help="Seconds that a running reply has when the server is stopped.",
)  # fmt: skip
@click.option(
    "--prompt-cache", metavar="SIZE", default="512MB", show_default=True,
    help="Memory for conversations that are not the last one, so that each reads on where it was; 0 = none.",
)  # fmt: skip
@click.option("--metrics", is_flag=True, help="Answer GET /metrics, for Prometheus.")
@click.option("-v", "--verbose", is_flag=True, help="A line for every request on stderr.")
@machine_options
def serve(
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    alias: str | None,
    max_tokens: int,
    queue: int,
    max_body: float,
    grace: float,
    metrics: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Serve an ensemble over HTTP: the OpenAI interface under /v1, and a page to chat at /.

    Missing models are fetched first. Stop it with Ctrl-C.
    """
    try:
        from gguf_fusion.server import run
        from gguf_fusion.server.service import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (
            "fastapi",
            "uvicorn",
            "starlette",
            "pydantic",
            "prometheus_client",
        ):
            raise
        raise MissingExtraError(error.name or "fastapi", "server") from error
    if not all(key.strip() and key.isascii() for key in api_keys):
        raise UsageError("--api-key: expected a key of visible ASCII characters, got an empty or another one")
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if host not in _LOOPBACK and not api_keys:
        warn(f"everybody who reaches {host} may use this server; --api-key KEY asks for a key")
    settings = Settings(
        host=host,
        keys=api_keys,
        alias=alias,
        max_tokens=max_tokens,
        max_body=int(max_body * 1e6),
        metrics=metrics,
    )
    run.serve(
        lambda: load_ensemble(options),
        settings,
        port=port,
        max_waiting=queue,
        grace_s=grace,
        ready=lambda address: note(f"listening on {address} (OpenAI clients: {address}/v1); stop with Ctrl-C"),
    )
    note("stopped")

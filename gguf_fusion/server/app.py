"""The application: routes, errors, guard and page put together."""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from gguf_fusion import __version__
from gguf_fusion.server.about import AboutRoutes
from gguf_fusion.server.errors import DESCRIBED, add_handlers
from gguf_fusion.server.guard import Guard
from gguf_fusion.server.metrics import Metrics
from gguf_fusion.server.owner import Owner
from gguf_fusion.server.service import Service, Settings
from gguf_fusion.server.texts import TextRoutes

_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def make_app(owner: Owner, settings: Settings | None = None) -> FastAPI:
    """The application over ``owner``, which somebody else starts and stops."""
    settings = settings or Settings()
    service = Service(owner, settings)
    app = FastAPI(title="gguf-fusion", version=__version__, docs_url=None, redoc_url=None, responses=DESCRIBED)
    add_handlers(app)
    app.add_middleware(Guard, keys=settings.keys, max_body=settings.max_body, host=settings.host)
    metrics = Metrics(owner) if settings.metrics else None
    AboutRoutes(app, service)
    TextRoutes(app, service, metrics)
    if metrics is not None:
        app.get("/metrics", response_class=PlainTextResponse)(metrics.response)
    for path, (name, kind) in _PAGE.items():
        app.get(path, include_in_schema=False, response_model=None)(partial(_page_file, name, kind))
    return app


async def _page_file(name: str, kind: str) -> Response:
    text = (files("gguf_fusion.server") / "page" / name).read_bytes()
    return Response(text, media_type=kind, headers={"Cache-Control": "no-cache"})

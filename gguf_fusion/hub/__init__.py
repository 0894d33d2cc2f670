"""Finding, fetching and checking model files."""

from gguf_fusion.hub.progress import Progress, Silent
from gguf_fusion.hub.obtain import Found, expected_size, find_local, is_offline, locate, locate_all, pull
from gguf_fusion.hub.refs import Target, default_name, resolve, resolve_one

__all__ = [
    "Found",
    "Progress",
    "Silent",
    "Target",
    "default_name",
    "expected_size",
    "find_local",
    "is_offline",
    "locate",
    "locate_all",
    "pull",
    "resolve",
    "resolve_one",
]

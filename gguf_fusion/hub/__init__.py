"""Finding, fetching and checking model files."""

from gguf_fusion.hub.inventory import fetched, fetched_outside, remove
from gguf_fusion.hub.obtain import (
    KINDS,
    Found,
    Planned,
    expected_size,
    find_local,
    is_offline,
    locate,
    locate_all,
    plan,
    pull,
)
from gguf_fusion.hub.progress import Progress, Silent
from gguf_fusion.hub.reach import reachable
from gguf_fusion.hub.refs import Target, default_name, of_expert, resolve, resolve_one

__all__ = [
    "KINDS",
    "Found",
    "Planned",
    "Progress",
    "Silent",
    "Target",
    "default_name",
    "expected_size",
    "fetched",
    "fetched_outside",
    "find_local",
    "is_offline",
    "locate",
    "locate_all",
    "of_expert",
    "plan",
    "pull",
    "reachable",
    "remove",
    "resolve",
    "resolve_one",
]

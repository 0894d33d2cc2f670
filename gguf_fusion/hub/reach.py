"""Whether the model hub answers at all."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request

_SECONDS = 4


def reachable() -> str:
    """Empty if the hub answers (with whatever status), else what went wrong and what to do."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        return f"HF_ENDPOINT={endpoint}: expected an http(s) address"
    request = urllib.request.Request(endpoint + "/api/whoami-v2", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""  # it answers; who we are was not the question
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"{endpoint} does not answer ({reason}); models also come from Python package indexes and local files"

"""``gguf-fusion worker``: lend this machine's devices to experts on another one."""

from __future__ import annotations

import threading

import click

from gguf_fusion.cli._output import note, warn
from gguf_fusion.devices import usable_cores
from gguf_fusion.errors import GgufFusionError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65535), default=50052, show_default=True)
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="Threads, where it computes on the CPU.")
def worker(host: str, port: int, threads: int | None) -> None:
    """Lend this machine's GPUs, or its CPU where it has none, to experts on another machine (their --rpc HOST:PORT).

    It serves one client at a time. TRUSTED NETWORKS ONLY: whoever reaches the port needs no password, reads along, and
    can probably run programs here. Needs a llama-cpp-python built with RPC. Stop it with Ctrl-C.
    """
    from gguf_fusion.experts import native_rpc

    if host in _LOOPBACK:
        note("only programs on this machine can reach this worker; --host ADDRESS lends it to others")
    else:
        warn(
            f"TRUSTED NETWORKS ONLY: whoever reaches {host}:{port} can use this machine without a password, reads "
            f"along, and can probably run programs here; close the port to everybody else (firewall, VPN)"
        )
    failed: list[GgufFusionError] = []

    def serve() -> None:
        try:
            native_rpc.serve(f"{host}:{port}", threads or usable_cores())
        except GgufFusionError as error:
            failed.append(error)

    # Native code waits for clients: in a thread of its own, so that Ctrl-C reaches this one.
    thread = threading.Thread(target=serve, name="worker", daemon=True)
    thread.start()
    thread.join(0.3)
    if thread.is_alive():
        note(f"serving at {host}:{port}; stop with Ctrl-C")
    while thread.is_alive():
        thread.join(0.5)
    if failed:
        raise failed[0]

"""The command line. Commands are imported when they are used, so ``--help`` stays fast."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from gguf_fusion import __version__
from gguf_fusion.errors import GgufFusionError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("gguf_fusion.cli.generate:run", "Stream text from an ensemble."),
    "serve": ("gguf_fusion.cli.serve:serve", "Serve the OpenAI interface and a page for the browser."),
    "chat": ("gguf_fusion.cli.chat:chat", "Talk with an ensemble."),
    "score": ("gguf_fusion.cli.evaluate:score", "Bits per byte of experts and strategies on files."),
    "battery": ("gguf_fusion.cli.battery:battery", "Try experts and strategies on 48 prompts."),
    "compat": ("gguf_fusion.cli.compat:compat", "How the vocabularies of experts relate."),
    "bench": ("gguf_fusion.cli.bench:bench", "Measure the speed of experts and ensembles."),
    "quants": ("gguf_fusion.cli.quants:quants", "Compare quantization levels, and choose."),
    "plan": ("gguf_fusion.cli.plan:plan_command", "Where the experts would lie, and what that takes."),
    "worker": ("gguf_fusion.cli.worker:worker", "Lend this machine to experts on another one (RPC)."),
    "doctor": ("gguf_fusion.cli.doctor:doctor", "Check this installation."),
    "router": ("gguf_fusion.cli.router:router", "Train a router that decides which expert speaks."),
    "discover": ("gguf_fusion.cli.discover:discover", "Search for the strategy that fits your texts."),
    "eval": ("gguf_fusion.cli.eval:evaluate", "Run tasks of lm-evaluation-harness."),
    "strategies": ("gguf_fusion.cli.strategies:strategies", "List the ways to combine experts."),
    "pull": ("gguf_fusion.cli.models:pull", "Fetch models: an ensemble, an expert, user/repo:QUANT, a URL."),
    "list": ("gguf_fusion.cli.models:list_models", "List known models and what is on this machine."),
    "show": ("gguf_fusion.cli.models:show", "Describe an ensemble, an expert or a file."),
    "rm": ("gguf_fusion.cli.models:rm", "Delete fetched model files."),
}
"""Name of a command -> where it is defined, and its line in ``--help``."""

EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that knows its commands by name and help line, and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (target, _) in COMMANDS.items() if importlib.util.find_spec(target.split(":")[0])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and exit: errors raised on purpose become one line and their exit status."""

        def run() -> Any:
            return click.Group.main(self, args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        try:
            status = run()
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            _exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            _exit(EXIT_INTERRUPTED)
        except GgufFusionError as error:
            click.echo(f"error: {error}", err=True)
            _exit(error.exit_status)
        except OSError as error:  # a full disk, mostly: what was found out is not on it, but nobody needs a traceback
            if error.errno != errno.EPIPE:
                where = "" if error.filename is None else f": {error.filename}"
                click.echo(f"error: {error.strerror or error}{where}", err=True)
            _exit(1)
        return _exit(status if isinstance(status, int) else 0)


def _exit(status: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # nothing more can be written: let the interpreter's last flush go nowhere instead of complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(status)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GGUF_FUSION"},
)
@click.version_option(__version__, prog_name="gguf-fusion")
def main() -> None:
    """Fuse local GGUF language models with different vocabularies, byte by byte."""

"""The `segue` command. It imports nothing heavy: each command imports what it needs when it runs.

Exit codes: 0 done, 1 the run failed (one sentence says what died first), 2 a mistake of the user's (one sentence says what, where
and what to do), 130 Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from segue import __version__
from segue.console import open_missing_streams, written_to
from segue.errors import RunFailed, UserError

P = ParamSpec("P")

app = typer.Typer(
    name="segue",
    help="Fully asynchronous reinforcement learning for LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, for instance configs/quickstart.toml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config, for instance learner.lr=1e-5. Repeatable."),
]


def _sentences(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's errors into one sentence on stderr and its result into the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except UserError as error:
            code = _say(str(error), 2)
        except RunFailed as error:
            code = _say(error.sentence, 1)
        except KeyboardInterrupt:
            code = _say("Interrupted.", 130)
        raise typer.Exit(code)

    return run


def _say(sentence: str, code: int) -> int:
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:  # the terminal is gone; without this Python would try again at its end, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return code


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"segue {__version__}")
        raise typer.Exit(0)


@app.command()
@_sentences
def train(
    config: ConfigFile,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run directory; default runs/<config name>-<time>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run from its newest checkpoint.")] = False,
    serial: Annotated[
        bool, typer.Option("--serial", help="Everything in one process on a logical clock: slower, the same every time.")
    ] = False,
    overrides: Overrides = None,
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="On N hosts, this one the first.", min=1)] = 1,
    address: Annotated[str, typer.Option("--address", help="With --hosts: where the others reach this host.")] = "",
    port: Annotated[int, typer.Option("--port", help="With --hosts: where it listens for them.", min=1024, max=65535)] = 29400,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config and where roles go, print the plan; start nothing.")
    ] = False,
) -> int:
    """Train a policy, evaluate it before and after, and write everything into a run directory."""
    if resume and run is None:
        raise UserError("--resume needs to know which run to go on with: add --run DIR.")
    if hosts > 1 and not address:
        raise UserError("--hosts needs --address, at which the other hosts reach this one: launch.sh takes it from HEAD_ADDR.")
    if hosts > 1 and serial:
        raise UserError("--serial runs everything in one process: leave --hosts out.")
    if dry_run:
        from segue.cluster.prepare import dry_run as show

        return show(config, overrides or [], serial, hosts)
    from segue.cluster.hosts.where import Where
    from segue.cluster.supervisor import supervise

    where = Where(hosts, address, port) if hosts > 1 else None
    return supervise(config, overrides or [], run, resume, serial, where)


@app.command()
@_sentences
def join(
    address: Annotated[str, typer.Option("--address", help="Of the first host (HEAD_ADDR).")],
    rank: Annotated[int, typer.Option("--rank", help="The number of this host, from 1 (NODE_RANK).", min=1)],
    port: Annotated[int, typer.Option("--port", help="Where the first host listens.", min=1024, max=65535)] = 29400,
    own: Annotated[str, typer.Option("--own-address", help="Of this host; default: where packets to the first leave.")] = "",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to look for the first host.", min=1.0)] = 300.0,
    forgiving: Annotated[bool, typer.Option("--forgiving", help="Exit with 0 however it ends: the first host tells.")] = False,
) -> int:
    """Take part in a run as another host than the first; launch.sh calls it."""
    from segue.cluster.hosts.member import join as take_part
    from segue.cluster.hosts.where import token_of

    try:
        code = take_part(address, port, rank, own, token_of(os.environ), seconds)
        return 0 if forgiving else code
    except (RunFailed, UserError) as error:
        if not forgiving:
            raise
        return _say(str(error), 0)


@app.command()
@_sentences
def warmstart(config: ConfigFile, overrides: Overrides = None) -> int:
    """Make (or find in the cache) the model that the config's \\[warmstart] table describes, and print its folder."""
    from segue.cluster.warmstart import warmstart as make
    from segue.config import load_config
    from segue.suite_path import look_beside

    look_beside(config)
    print(make(load_config(config, overrides), progress=True))
    return 0


@app.command("eval")
@_sentences
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config (its starting model) or a run directory.")],
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint of the run; default its newest.", min=0)] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Evaluate a model on the held-out tasks of its config."""
    from segue.cluster.evaluate import evaluate as run_evaluation

    return run_evaluation(target, overrides or [], step, as_json)


@app.command("config")
@_sentences
def show_config(config: ConfigFile, overrides: Overrides = None) -> int:
    """Print the resolved config as TOML: what a run would really use."""
    from segue.config import load_config, to_toml

    with written_to(sys.stdout):
        print(to_toml(load_config(config, overrides)), end="")
    return 0


@app.command()
@_sentences
def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, of a run that goes on or is over.")],
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One picture instead of a live one; without a terminal always.")] = False,
) -> int:
    """Show live who works and who waits, queues, staleness, versions, latencies and alerts of a run. Ctrl-C ends it."""
    from segue.top.shell import top as show

    return show(run, interval, once, sys.stdout)


@app.command()
@_sentences
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="With --html: where the page goes; default RUN/report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    as_html: Annotated[bool, typer.Option("--html", help="Write a page with the curves of the run and print its path.")] = False,
) -> int:
    """Show what a run reached, also while it runs or after it stopped early."""
    from segue.report.read import read_report

    if file is not None and not as_html:
        raise UserError(f"{file} would be the file of a page: add --html, or leave it out to see the table.")
    if as_json and as_html:
        raise UserError("--json and --html are two reports: ask for one at a time.")
    if as_html:
        from segue.report.page import write_page

        page = write_page(run, file)
        with written_to(sys.stdout):
            print(page)
        return 0
    summary, incomplete = read_report(run)
    with written_to(sys.stdout):
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            from segue.report.table import print_summary

            print_summary(summary, f"Run {run}", sys.stdout)
    if incomplete:
        print(incomplete, file=sys.stderr)
    return 0


@app.command()
@_sentences
def monitor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, of a run that goes on or is over.")],
    port: Annotated[int, typer.Option("--port", help="Where Prometheus listens, on 127.0.0.1.", min=1, max=65535)] = 9090,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two scrapes.", min=0.1)] = 5.0,
) -> int:
    """Start a Prometheus for a run, with Segue's rules and alerts; it ends with this command."""
    from segue.cluster.processes import die_with_parent
    from segue.monitoring.serve import monitor as serve

    return serve(run, port, interval, lambda line: print(line, flush=True), die_with_parent)


@app.command()
@_sentences
def dashboards(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say what is out of date, undeclared or unexplained.")
    ] = False,
) -> int:
    """Write the files of `monitoring/` (rules, alerts, dashboards) from the catalogue of metrics."""
    from segue.monitoring import generate

    if not check:
        for path in generate.write():
            print(path)
        return 0
    wrong = generate.check()
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
@_sentences
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="For instance straggler or env-latency; its options follow.")] = "",
) -> int:
    """Run a benchmark; `segue bench NAME --help` tells its options."""
    from segue.bench import listing, run

    if name in ("", "--help", "-h"):
        print(listing())
        return 0
    return run(name, context.args)


def main() -> None:
    """The entry point of the `segue` script."""
    open_missing_streams()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads per process on busy cores are ten times slower than one
    try:
        app(prog_name="segue")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""``assay node``: lend compute to a run.

Exit codes: 0 all is well, 1 something failed, 2 bad usage or configuration, 3 refused (banned, unknown to the
coordinator, a bad join token, or a drill that is not enrolled).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protocol.errors import AssayError, exit_status, explain
from protocol.text import printable

if TYPE_CHECKING:
    from node.daemon import Daemon

REFUSED: Final = 3
#: Codes that mean that the coordinator does not want this node.
_UNWANTED: Final = frozenset({"E_NODE_BANNED", "E_NODE_UNKNOWN", "E_JOIN_TOKEN", "E_DRILL_NOT_ENROLLED"})

EPILOG: Final = """\b
Examples:
  assay node join 'assay://HOST:PORT/?root=..&run=..&token=..' --home ~/.assay
  assay node selftest --home ~/.assay
  assay node run --home ~/.assay --batch 16
  assay node status --home ~/.assay

\b
Exit codes: 0 well, 1 failed, 2 bad usage or configuration, 3 refused (banned, unknown, not enrolled).
"""

app = typer.Typer(
    help="Lend compute: join a run, generate rollouts, follow the weights.", no_args_is_help=True, epilog=EPILOG,
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)

HomeOption = Annotated[Path, typer.Option("--home", help="The node's folder.", envvar="ASSAY_HOME", show_envvar=True)]
DEFAULT_HOME: Final = Path("~/.assay")


@app.command(epilog="Example: assay node join 'assay://127.0.0.1:8700/?root=..&run=..&token=..' --home ~/.assay")
def join(
    link: Annotated[str, typer.Argument(help="The join link, in quotes, as the operator gave it.")],
    home: HomeOption = DEFAULT_HOME,
    name: Annotated[str | None, typer.Option(help="How the node is called in lists.")] = None,
) -> None:
    """Make a key, pin the run's root key, register. Repeating it is harmless."""
    from node.home import Home
    from node.join import join as join_run
    from protocol.api import JoinLink
    from protocol.client import CoordinatorClient
    from protocol.clock import SystemClock

    def act() -> int:
        place, parsed = Home(home.expanduser()), JoinLink.parse(link)
        with CoordinatorClient(parsed.base_url, None, run_id=parsed.run_id) as client:
            joined = join_run(parsed, place, client, SystemClock(), name=name)
        print(f"joined run {printable(joined.run.name)} ({joined.run.run_id}) as {joined.name}")
        print(f"node id   {joined.node_id}")
        print(f"device    cpu, free disk {place.free_mb():,} MiB")
        if joined.new_key:
            print(f"back up   {place.key}: the node is this key; a lost key cannot be recovered")
        if joined.state == "banned":
            print("this node is banned from the run", file=sys.stderr)
            return REFUSED
        print(f"next      assay node run --home {home}")
        return 0

    _exit(act)


@app.command(epilog="Example: assay node run --home ~/.assay --batch 16")
def run(
    home: HomeOption = DEFAULT_HOME,
    batch: Annotated[int | None, typer.Option(help="Rollouts generated at once.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.")] = None,
    drill: Annotated[
        str | None, typer.Option(help="Cheat on purpose: best-of-n, int8, stale, edited-answer. Enrolled keys only.")
    ] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to finish and upload after SIGTERM.")
    ] = None,
    swarm: Annotated[
        bool | None, typer.Option("--swarm/--no-swarm", help="Exchange weights with other nodes (off by default).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    log: Annotated[Path | None, typer.Option(help="Log file; default: HOME/node.log, - for stderr.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and end.")] = False,
) -> None:
    """Generate rollouts until the run is complete.

    SIGTERM or Ctrl-C ends after what is begun is finished and uploaded, twice at once; SIGUSR1 prints progress and
    stacks.
    """

    def act() -> int:
        from node.config import NodeConfig
        from protocol.config import load_config

        settings, origin = load_config(NodeConfig, config, "ASSAY_NODE_", {
            "home": home.expanduser(), "batch": batch, "threads": threads, "drill": drill,
            "drain_timeout_s": drain_timeout_s, "swarm": swarm,
        })
        if dry_run:
            for field, value in settings.model_dump(mode="json").items():
                print(f"{field} = {json.dumps(value)}  # {origin[field]}")
            return 0
        return _run(settings, log)

    _exit(act)


@app.command(epilog="Example: assay node status --home ~/.assay --json")
def status(
    home: HomeOption = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="The whole status as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds.")] = False,
) -> None:
    """What the node is doing, and why it is not. Exit status 1 when it is not running."""

    def act() -> int:
        from node.home import Home

        place = Home(home.expanduser())
        while True:
            running = _print_status(place, as_json=as_json)
            if not watch:
                return 0 if running else 1
            time.sleep(2)

    _exit(act)


@app.command(epilog="Example: assay node peers --home ~/.assay")
def peers(
    home: HomeOption = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known of every peer, as JSON.")] = False,
) -> None:
    """The swarm: peers, what went to and fro, and why one is not connected. Exit status 1 when it is not running."""

    def act() -> int:
        from node.home import Home, status_age_s
        from node.peer_table import lines
        from protocol.clock import SystemClock

        place = Home(home.expanduser())
        place.pin()
        view = place.read_peers() or {"running": False, "why": "the node never ran", "connected": 0, "peers": []}
        if view["running"] and not _alive((place.read_status() or {}).get("pid")):
            view |= {"running": False, "why": "the node is not running"}
        age = status_age_s(view, SystemClock().now_ms()) if "updated_at_ms" in view else None
        print(json.dumps(view | {"age_s": age}) if as_json else "\n".join(lines(view, age)))
        return 0 if view["running"] else 1

    _exit(act)


@app.command("explain", epilog="Example: assay node explain 0123456789abcdef0123456789abcdef --home ~/.assay")
def explain_command(
    rollout: Annotated[
        str | None, typer.Argument(help="A receipt or lease id; without one, the newest that did not pass.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="The explanation as JSON.")] = False,
) -> None:
    """What became of handed-in work: signed receipt and verdict, expected and got, likely causes.

    Exit status 0 when it passed or is still being checked, 1 when it failed or was set aside.
    """

    def act() -> int:
        from node.explanation import explain as explain_rollout
        from node.home import Home
        from protocol.client import CoordinatorClient

        place = Home(home.expanduser())
        pin = place.pin()
        with CoordinatorClient(pin.coordinator, place.identity(), run_id=pin.run_id) as client:
            found = explain_rollout(place, client, rollout)
        print(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()))
        return 0 if found.state in ("pending", "claimed", "pass") else 1

    _exit(act)


@app.command(epilog="Example: assay node selftest --home ~/.assay --rollouts 8")
def selftest(
    home: HomeOption = DEFAULT_HOME,
    rollouts: Annotated[int, typer.Option(min=1, max=4096, help="Rollouts to make.")] = 8,
    batch: Annotated[int | None, typer.Option(help="Rollouts generated at once.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Make rollouts and verify them here, with the run's thresholds and no effect on trust."""

    def act() -> int:
        from node.assemble import connect
        from node.config import NodeConfig
        from node.home import Home
        from node.selftest import selftest as test
        from protocol.clock import SystemClock
        from protocol.config import load_config

        settings, _ = load_config(NodeConfig, None, "ASSAY_NODE_", {"home": home.expanduser(), "batch": batch})
        place, clock = Home(settings.home), SystemClock()
        with place.locked(), connect(place, settings, clock) as client:
            report = test(place, settings, client, clock, rollouts=rollouts)
        if as_json:
            print(json.dumps(dataclasses.asdict(report) | {"passed": report.passed}))
        else:
            print(f"version {report.version}: {report.rollouts} rollouts, {report.tokens} tokens, "
                  f"{report.tokens_per_s:.0f} tokens/s")
            print(f"sampler replay       {report.replay_mismatches} mismatches, expected 0")
            print(f"mean KL per rollout  {report.mean_kl:.2e} nats, at most {report.max_mean_kl:.2e}")
            print(f"KL of a token        {report.token_kl:.2e} nats, at most {report.max_token_kl:.2e}")
            print("PASS" if report.passed else "FAIL")
        return 0 if report.passed else 1

    _exit(act)


@app.command(epilog="Example: assay node pause --home ~/.assay")
def pause(home: HomeOption = DEFAULT_HOME) -> None:
    """Take no new work until `resume`; what is begun is finished."""
    _exit(lambda: _pause(home, paused=True))


@app.command(epilog="Example: assay node resume --home ~/.assay")
def resume(home: HomeOption = DEFAULT_HOME) -> None:
    """Take work again."""
    _exit(lambda: _pause(home, paused=False))


# -- what the commands do --------------------------------------------------------------------------------


def _run(settings: Any, log: Path | None) -> int:
    from node.assemble import assemble, connect
    from node.home import Home
    from protocol.clock import SystemClock
    from protocol.logs import setup_logging

    home, clock = Home(settings.home), SystemClock()
    home.pin()
    signal.signal(signal.SIGTERM, _end_early)
    setup_logging(None if log == Path("-") else log or home.log, settings.log_level)
    with home.locked(), connect(home, settings, clock) as client:
        home.write_status({"state": "starting", "pid": os.getpid(), "updated_at_ms": clock.now_ms()})
        daemon = assemble(home, settings, client, clock)
        _handle_signals(daemon)
        print(f"node {client.identity.id[:16] if client.identity else ''} on cpu, {settings.threads} thread(s), "
              f"batch {settings.batch}", flush=True)
        outcome = daemon.run()
    ending = daemon.health.ending
    print(ending[1] if ending else "ended", file=sys.stderr if outcome else sys.stdout, flush=True)
    return int(outcome)


def _end_early(*_: object) -> None:
    """SIGTERM before there is anything to finish."""
    sys.exit(0)


def _handle_signals(daemon: Daemon) -> None:
    def end(*_: object) -> None:
        if daemon.health.ending is None:
            daemon.drain()
        else:
            daemon.abort()

    def report(*_: object) -> None:
        print(json.dumps(daemon.status(), default=str), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGUSR1, report)


def _pause(home: Path, *, paused: bool) -> int:
    from node.home import Home

    place = Home(home.expanduser())
    place.pin()
    place.pause(paused=paused)
    print("paused" if paused else "resumed")
    return 0


def _print_status(place: Any, *, as_json: bool) -> bool:
    from node.home import status_age_s
    from protocol.clock import SystemClock

    place.pin()
    found = place.read_status() or {"state": "never run"}
    running = _alive(found.get("pid"))
    age = status_age_s(found, SystemClock().now_ms()) if "updated_at_ms" in found else None
    found |= {"running": running, "age_s": age}
    if as_json:
        print(json.dumps(found))
        return running
    state = found["state"] if running or found["state"] == "never run" else f"not running (was {found['state']})"
    print(f"state     {state}" + ("" if age is None else f", as of {age:.0f} s ago"))
    for label, text in _lines(found):
        print(f"{label:<9} {text}")
    return running


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What a human wants to know, in order."""
    if "node_id" not in found:
        return []
    contact = found.get("last_contact_age_s")
    reasons = ", ".join(f"{code} {count}" for code, count in sorted((found.get("reasons") or {}).items()))
    lines = [
        ("why idle", str(found.get("why") or "")),
        ("node", f"{found['name']} {found['node_id'][:16]}"),
        ("version", f"{found['engine_version']} of {found['announced_version']}, lag {found['lag_versions']}"),
        ("speed", f"{found['tokens_per_s']} tokens/s, {found['tokens']} tokens since start"),
        ("work", f"{found['open_samples']} samples open, {found['unsent']} leases unsent"),
        ("verdicts", f"accepted {found.get('accepted')}, rejected {found.get('rejected')}, "
                     f"inconclusive {found.get('inconclusive')}" + (f" ({reasons})" if reasons else "")),
        ("leases", "pinned (E_STEERING): rollouts keep their first version" if found.get("pinned_ms") else ""),
        ("credit", f"{found.get('credit')} settled, {found.get('credit_pending')} pending"),
        ("peers", "" if found.get("peers_connected") is None else f"{found['peers_connected']} connected"),
        ("contact", "never" if contact is None else f"{contact} s before that"),
        ("disk", f"{found['free_disk_mb']} MiB free"),
    ]
    return [(label, text) for label, text in lines if text]


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exit(act: Callable[[], int]) -> None:
    """End with the status of ``act``; errors are explained on stderr."""
    try:
        status = act()
    except AssayError as error:
        print(explain(error), file=sys.stderr)
        status = REFUSED if error.code in _UNWANTED else exit_status(error)
    raise typer.Exit(status)

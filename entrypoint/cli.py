"""Verbs; nothing else. Each imports what it needs, so that a verb costs no more than its own work."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .errors import EXIT_OK, EXIT_STATE_IN_USE, EXIT_UNAVAILABLE, EXIT_USAGE, Stop, config_rejected, refused

if TYPE_CHECKING:
    from .config.settings import Loaded

Handler = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """A wrong verb or option exits 64 (EX_USAGE), in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"relaunch: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = difflib.get_close_matches(str(value), known, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            name = str(action.metavar or action.dest).lower()
            self.exit(EXIT_USAGE, f"relaunch: {name} {value!r} is not known; {hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["serve"], ["gateway"]):
        # Nothing runs yet: a stop this early has nothing to drain.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_OK))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    arguments = parser.parse_args(words)
    handler: Handler = arguments.handler
    try:
        code = handler(arguments)
        sys.stdout.flush()
        return code
    except Stop as stop:
        return _refuse(stop)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        return _refuse(_refusal(error))


def _refuse(stop: Stop) -> int:
    """Print the refusal without any secret, whoever wrote its text; return the exit code."""
    from .config.schema import SECRETS
    from .scrub import from_environment

    scrub = from_environment(os.environ, SECRETS)
    print(f"relaunch: {scrub(stop.line())}", file=sys.stderr)
    return stop.exit_code


def _refusal(error: OSError) -> Stop:
    """Return the Stop for an operating system error that nothing nearer to it has named, with the setting that chose
    the path. Raises the error itself when it concerns no path."""
    from .config import loading

    if error.filename is not None:
        try:
            places = loading.places(loading.load().settings, os.environ)
        except Stop:  # whatever is wrong with the settings, the path is wrong too
            places = {}
        return refused(error, places)
    if error.errno != errno.ENOSPC:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Stop("disk_full", "no space left where the answer is written", "make room there")


def _parser() -> _Parser:
    parser = _Parser(
        prog="relaunch",
        description="Serve a big model with sglang: plan the memory, verify the weights, name the crash, bring it "
        "back. Configured by RELAUNCH_ environment variables (docs/settings.md).",
    )
    parser.add_argument("--version", action="version", version=f"relaunch {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)

    def verb(name: str, handler: Handler, text: str, *, with_json: bool = True) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        if with_json:
            sub.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        return sub

    verb("serve", _serve, "serve the model and keep it served; SIGTERM drains and exits 0", with_json=False)
    gateway = verb("gateway", _gateway, "one address in front of several replicas (RELAUNCH_REPLICAS)", with_json=False)
    gateway.add_argument("--check", action="store_true", help="read the settings and refuse bad ones; start nothing")
    waiting = verb("wait", _wait, "until the model is served, saying where the start stands", with_json=False)
    waiting.add_argument("--installing", type=Path, help=argparse.SUPPRESS)
    top = verb("top", _top, "one screen of what the running engine and its GPUs do now", with_json=False)
    top.add_argument("--once", action="store_true", help="print it once and leave")
    connect = verb("connect", _connect, "how clients reach the served model: curl, SDKs, coding agents")
    connect.add_argument(
        "client", nargs="?", metavar="CLIENT", help="such as curl, openai, claude-code; default: all names"
    )
    plan = verb(
        "plan", _plan, "what would be started and why: memory per GPU, settings, engine command; starts nothing"
    )
    plan.add_argument("--engine", action="store_true", help="ask the installed engine whether it accepts the plan")
    plan.add_argument(
        "--compare",
        metavar="OTHER",
        help="beside the plan of another version (its clone or relaunch command) or of a FILE of plan --json",
    )
    weights = verb("weights", _weights, "find, fetch, verify or repair the weights")
    weights.add_argument("action", choices=["status", "fetch", "verify", "repair"])
    weights.add_argument("--full", action="store_true", help="hash every byte")
    verb("doctor", _doctor, "check the host, the driver and the caches")
    verb("config", _config, "every setting, its value and where it came from; secrets masked")
    explain = verb("explain", _explain, "name the cause of a crash from a log of sglang, ours or anyone's")
    explain.add_argument("file", type=Path, metavar="FILE.log")
    verb("history", _history, "boots, crashes, what was changed and why")
    bench = verb("bench", _bench, "how fast the running server is, under a load at several concurrencies")
    _add_target(bench)
    bench.add_argument(
        "--load", default="chat", metavar="FILE", help="chat, agent, long, tokens in and out as 1024/512, or a file"
    )
    bench.add_argument("--concurrency", default="1,8,64", metavar="N,N", help="clients at a time; default: 1,8,64")
    bench.add_argument(
        "--seconds", type=float, default=30.0, metavar="N", help="about how long each is held; default: 30"
    )
    check = verb("check", _check, "whether the running server does what clients need, item by item")
    _add_target(check)
    compare = verb("compare", _compare, "what differs between two receipts, what explains most first")
    compare.add_argument("files", type=Path, nargs=2, metavar="FILE.json")
    tune = verb("tune", _tune, "try plans on this host and keep one that is faster by more than the noise")
    tune.add_argument("--goal", choices=["balanced", "latency", "throughput", "context"], help="default: RELAUNCH_GOAL")
    tune.add_argument("--budget", default="20m", metavar="TIME", help="for all of it, about; default: 20m")
    tune.add_argument("--load", metavar="FILE", help="as for bench; default: the goal's own")
    tune.add_argument(
        "--arm", action="append", default=[], metavar="'NAME=VALUE ...'", help="try this too; may be repeated"
    )
    tune.add_argument("--only", action="store_true", help="try nothing but what --arm names")
    _add_receipt(tune)
    hardware = verb("hardware", _hardware, "the box; its JSON is the inventory that RELAUNCH_GPU_INVENTORY reads")
    hardware.add_argument("--measure", action="store_true", help="measure its links; only while nothing is served")
    reset = verb("reset", _reset, "forget what was learned", with_json=False)
    what = reset.add_mutually_exclusive_group()
    what.add_argument("--learned", action="store_true", help="only known-good settings")
    what.add_argument("--tuned", action="store_true", help="only what tune found")
    what.add_argument("--jit-cache", action="store_true", help="only compiled kernels and tuning results")
    warm = verb("warm", _warm, "compile ahead the kernels that the plan will use, without a GPU, into the cache")
    warm.add_argument("--sm", type=int, metavar="N", help="such as 120; default: this box's GPUs, else 120")
    warm.add_argument("--jobs", type=int, metavar="N", help="compiler jobs at a time; default: what the memory holds")
    warm.add_argument("--check", action="store_true", help="say what is compiled already; compile nothing")
    warm.add_argument("names", nargs="*", metavar="KERNEL", help="only these; default: all that the plan's route uses")
    verb("restart", _restart, "drain and restart the engine of the running supervisor", with_json=False)
    report = verb("report", _report, "one archive for whoever is to help: no secrets, no prompts", with_json=False)
    report.add_argument(
        "-o", "--output", metavar="FILE", help="default: relaunch-report-<time>.tar.gz here, or at home from a clone"
    )
    packing = verb(
        "pack", _pack, "all that a site without a network needs to serve, in one directory, to be carried there"
    )
    packing.add_argument("--out", type=Path, required=True, metavar="DIR", help="goes on with what is there already")
    packing.add_argument(
        "--image", nargs="?", const="relaunch:local", metavar="NAME", help="with this container image (relaunch:local)"
    )
    packing.add_argument("--weights", action="store_true", help="with the weights, which must be here and good")
    packing.add_argument("--check", action="store_true", help="say how much it is and whether it fits; write nothing")
    unpacking = verb("unpack", _unpack, "prove a pack, install from it and serve, without a network", with_json=False)
    unpacking.add_argument("folder", type=Path, metavar="DIR")
    unpacking.add_argument("--no-serve", action="store_true", help="end when everything is in its place")
    unpacking.add_argument("--check", action="store_true", help="prove the pack; install and serve nothing")
    test = verb("test", _test, "in a clone: run the tests; takes the options of pytest", with_json=False)
    test.add_argument("words", nargs="*", metavar="PYTEST_OPTION", help="such as tests/plan -k kv; default: all tests")
    shell = verb("completion", _completion, "a completion script: source <(relaunch completion bash)", with_json=False)
    shell.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def _add_target(sub: argparse.ArgumentParser) -> None:
    """The options of verbs that ask a running server."""
    sub.add_argument("--url", help="any OpenAI-compatible server; default: the one of this host's settings")
    _add_receipt(sub)


def _add_receipt(sub: argparse.ArgumentParser) -> None:
    """The options of verbs that write a receipt."""
    sub.add_argument("--name", help="what the receipt calls this box or run; default: no name")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="the receipt; default: in STATE_DIR/receipts")


def _with_preset(loaded: Loaded) -> Loaded:
    """``loaded`` with the preset that suits this host where neither a preset nor a model is set. Raises Stop (78)."""
    from .config import loading
    from .host import discover

    box = discover.current(loaded.settings.gpu_inventory, os.environ)
    return loading.resolve_preset(loaded, len(box.gpus), recorded=box.recorded)


def _print(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def _serve(_: argparse.Namespace) -> int:
    from .config import loading
    from .group.membership import make
    from .supervisor import serve
    from .ui import terminal

    loaded = loading.load()
    loaded.check_engine_args()
    return serve.run(loaded, os.environ, make, terminal.header)


def _gateway(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .gateway import gateway, replicas

    loaded = loading.load()
    if arguments.check:
        replicas.parse(loaded.settings.replicas)
        return EXIT_OK
    return gateway.run(loaded, os.environ)


def _wait(arguments: argparse.Namespace) -> int:
    from .ui import wait

    return wait.run(os.environ, arguments.installing)


def _top(arguments: argparse.Namespace) -> int:
    from .ui import top

    return top.run(os.environ, once=arguments.once)


def _connect(arguments: argparse.Namespace) -> int:
    from .ui import connect

    return connect.run(os.environ, arguments.client, as_json=arguments.json)


def _test(_: argparse.Namespace) -> int:
    raise config_rejected("the tests belong to a clone of the repository", "run ./relaunch test in one")


def _plan(arguments: argparse.Namespace) -> int:
    from .supervisor.planning import plan_document

    document, code = plan_document(
        os.environ,
        lambda text: print(f"relaunch: {text}", file=sys.stderr, flush=True),
        ask_engine=arguments.engine,
    )
    if arguments.compare:
        from .supervisor.comparison import compare_with

        document = compare_with(arguments.compare, document, os.environ)
    if arguments.json:
        _print(document)
    else:
        from rich.console import Console

        from .ui import compare_text, plan_text

        render = compare_text.render if arguments.compare else plan_text.render
        Console(highlight=False).print(render(document))
    return code


def _weights(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .ui import weights_progress
    from .weights import commands

    loaded = _with_preset(loading.load())
    with weights_progress.reporting() as on_progress:
        document, code = commands.run(arguments.action, loaded, full=arguments.full, on_progress=on_progress)
    if arguments.json:
        _print(document)
    else:
        from .ui import tables

        tables.weights(document)
    return code


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import examine
    from .ui import tables

    document = examine.examine(os.environ)
    if arguments.json:
        _print(document)
    else:
        tables.doctor(document)
    return EXIT_OK if document["ok"] else EXIT_UNAVAILABLE


def _config(arguments: argparse.Namespace) -> int:
    from .config import loading

    loaded = loading.load()
    if not (loaded.settings.preset or loaded.settings.model):
        loaded = _with_preset(loaded)
    loaded.check_engine_args()
    if arguments.json:
        _print(loaded.document())
    else:
        from .ui import tables

        tables.config(loaded.document())
    return EXIT_OK


def _explain(arguments: argparse.Namespace) -> int:
    from .healing.explain import explain_file

    document = explain_file(arguments.file).document()
    if arguments.json:
        _print(document)
    else:
        from .ui import tables

        tables.explain(document)
    return EXIT_OK


def _history(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .state.post_mortems import history

    state_dir = loading.load().settings.state_dir
    if state_dir.exists() and not state_dir.is_dir():
        raise Stop("permission_denied", f"RELAUNCH_STATE_DIR={state_dir} is no directory", "set RELAUNCH_STATE_DIR")
    if os.path.lexists(state_dir):
        os.scandir(state_dir).close()  # one that may not be read is not an empty one
    document = history(state_dir)
    if arguments.json:
        _print(document)
    else:
        from .ui import tables

        tables.history(document)
    return EXIT_OK


def _bench(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .tuning import bench, loads, target
    from .tuning.generator import Generator
    from .ui import tuning_text

    try:
        concurrency = bench.parse_concurrency(arguments.concurrency)
    except ValueError:
        raise Stop("config_rejected", "--concurrency takes numbers such as 1,8,64", exit_code=EXIT_USAGE) from None
    question = bench.Question(loads.named(arguments.load), concurrency, arguments.seconds)
    settings = loading.load().settings
    with target.reach(settings, arguments.url) as server, Generator(os.environ, server.api_key) as generator:
        with tuning_text.bench_progress(concurrency) as shown:
            found = bench.measure(server, generator, question, shown)
        plan = server.plan
    document = _receipt("bench", found, plan, arguments)
    if arguments.json:
        _print(document)
    else:
        tuning_text.bench(found)
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .tuning import check, target
    from .ui import tuning_text

    with target.reach(loading.load().settings, arguments.url) as server:
        found = check.run(server, (lambda item: None) if arguments.json else tuning_text.check_item)
        plan = server.plan
    document = _receipt("check", check.for_receipt(found), plan, arguments)
    if arguments.json:
        _print({**document, "check": found})
    return EXIT_OK if found["ok"] else EXIT_UNAVAILABLE


def _tune(arguments: argparse.Namespace) -> int:
    from .tuning import arms, tune
    from .ui import tuning_text
    from .units import parse_duration

    try:
        budget = parse_duration(arguments.budget)
    except ValueError as error:
        raise Stop("config_rejected", f"--budget {arguments.budget}: {error}", exit_code=EXIT_USAGE) from None
    own = tuple(arms.parse(text) for text in arguments.arm)
    options = tune.Options(arguments.goal or "", budget, arguments.load, own, arguments.only)
    with tuning_text.arms_table() as on_arm:
        found = tune.run(os.environ, options, on_arm, lambda text: print(f"relaunch: {text}", file=sys.stderr))
    plan = found.pop("plan")
    document = _receipt("tune", found, plan, arguments)
    if arguments.json:
        _print(document)
    else:
        tuning_text.tune(found)
    return EXIT_OK


def _receipt(kind: str, found: dict[str, Any], plan: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the receipt of a measurement, say where, and return it."""
    from .config import loading
    from .host import discover
    from .state import links
    from .tuning import receipt

    settings = loading.load().settings
    box = discover.current(settings.gpu_inventory, os.environ)
    measured = links.read(settings.state_dir, box) if plan is not None else None
    document = receipt.make(kind, found, box, plan, os.environ, links=measured, name=arguments.name)
    written = receipt.write(document, settings.state_dir, arguments.output)
    print(f"relaunch: receipt: {written}", file=sys.stderr)
    return document


def _compare(arguments: argparse.Namespace) -> int:
    from .tuning import compare, receipt
    from .ui import tuning_text

    document = compare.compare(*(receipt.read(path) for path in arguments.files))
    if arguments.json:
        _print(document)
    else:
        tuning_text.compare(document)
    return EXIT_OK


def _hardware(arguments: argparse.Namespace) -> int:
    from .config import loading
    from .host import discover
    from .state import links

    settings = loading.load().settings
    box = discover.current(settings.gpu_inventory, os.environ)
    if arguments.measure:
        from .tuning.links import measure

        measure(box, settings, os.environ)
    measured = links.read(settings.state_dir, box)
    if arguments.json:
        _print({**box.document(), **({"links": measured} if measured else {})})
    else:
        from .ui import tables

        tables.hardware(box, links=measured)
    return EXIT_OK


def _reset(arguments: argparse.Namespace) -> int:
    import shutil

    from .config import loading
    from .state import tuned
    from .state.lock import Lock

    settings = loading.load().settings
    if (pid := Lock.owner(settings.state_dir)) is not None:
        raise Stop(
            "config_rejected",
            f"supervisor {pid} serves on RELAUNCH_STATE_DIR={settings.state_dir} and would write back what is removed",
            "stop it first (Ctrl-C, or SIGTERM), then reset and start it again",
            exit_code=EXIT_STATE_IN_USE,
        )
    lock = Lock(settings.state_dir)
    lock.acquire()
    try:
        everything = not (arguments.learned or arguments.jit_cache or arguments.tuned)
        targets = []
        if everything or arguments.learned:
            targets.append(settings.state_dir / "known-good")
        if everything or arguments.tuned:
            targets += [tuned.folder(settings.state_dir), settings.state_dir / "tune"]
        if everything or arguments.jit_cache:
            targets.append(settings.cache_dir / "jit")
        for target in targets:
            if target.exists():
                shutil.rmtree(target)
                print(f"removed {target}")
            else:
                print(f"nothing in {target}")
    finally:
        lock.release()
    return EXIT_OK


def _warm(arguments: argparse.Namespace) -> int:
    from .supervisor import warm

    document, code = warm.run(os.environ, arguments.sm, arguments.names, arguments.jobs, arguments.check)
    if arguments.json:
        _print(document)
    else:
        warm.show(document)
    return code


def _restart(_: argparse.Namespace) -> int:
    from .config import loading
    from .state.lock import Lock

    state_dir = loading.load().settings.state_dir
    pid = Lock.owner(state_dir)
    if pid is None:
        raise config_rejected(
            f"no supervisor runs on {state_dir}", "start one with relaunch serve, or set RELAUNCH_STATE_DIR"
        )
    os.kill(pid, signal.SIGHUP)
    print(f"supervisor {pid} drains and restarts its engine; watch /readyz")
    return EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    from .doctor import report

    print(report.write(os.environ, report.output_path(arguments.output)))
    return EXIT_OK


def _pack(arguments: argparse.Namespace) -> int:
    from .pack import make
    from .ui.progress_line import ProgressLine

    shown = ProgressLine(sys.stderr)
    request = make.Request(arguments.out, arguments.image, arguments.weights, arguments.check)
    try:
        document = make.pack(request, os.environ, shown)
    finally:
        shown.end()
    if arguments.json:
        _print(document)
    else:
        print(make.show(document, arguments.out))
    return EXIT_OK


def _unpack(arguments: argparse.Namespace) -> int:
    from .pack import unpack
    from .ui.progress_line import ProgressLine

    shown = ProgressLine(sys.stderr)
    try:
        settings = unpack.unpack(arguments.folder.absolute(), os.environ, shown, check=arguments.check)
        if not (arguments.check or arguments.no_serve):
            unpack.serve(settings, os.environ, shown)
    finally:
        shown.end()
    return EXIT_OK


def _completion(arguments: argparse.Namespace) -> int:
    from .ui.completion import script

    sys.stdout.write(script(_parser(), arguments.shell))
    return EXIT_OK

"""The command line. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError
from pdserve.plan.arguments import add_transfer_arguments

if TYPE_CHECKING:
    from pdserve.config import Settings

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

FLAG_KEYS = {
    "model": "model.path",
    "preset": "deployment.preset",
    "prefill": "deployment.prefill",
    "decode": "deployment.decode",
    "colocated": "deployment.colocated",
    "host": "http.host",
    "port": "http.port",
    "dtype": "engine.dtype",
}
DEMO_SETTINGS = {"deployment.decode": 2, "engine.kv_cache_tokens": 16_384, "http.port": 0}
"""What clusters/demo.yaml says; a wheel does not carry that file."""

SERVE_EXAMPLES = """\
examples:
  pdserve serve                                  the embedded model, one prefill and one decode node
  pdserve serve ~/models/llama --decode 2        a local Hugging Face directory, two decode nodes
  pdserve serve --colocated 1                    prefill and decode on one node: the baseline
  pdserve serve --config clusters/local.yaml --set engine.page_size=16
  pdserve serve ~/models/llama --set deployment.decode.tp=2      a decode node of two ranks
  pdserve serve --config clusters/r1-dp.yaml --decode 2          a preset, with other numbers of nodes

Flags override the file. clusters/local.yaml lists every key with its default.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status. 2: the command line or the settings are wrong, and nothing was started."""
    arguments, rest = _parser().parse_known_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    if arguments.command == "bench":
        arguments.rest = rest
    elif rest:
        _parser().error(f"unrecognized arguments: {' '.join(rest)} (pdserve {arguments.command} --help lists them)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes and shared memory end with us either way
    try:
        return command(arguments)
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve",
        description="Serves a language model with prefill and decode on different nodes.",
        epilog="pdserve COMMAND --help says more about one command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_plan(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="start nodes and an OpenAI-compatible server",
        description="Starts prefill and decode nodes and an OpenAI-compatible HTTP server; Ctrl-C ends all of it.",
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="a local Hugging Face directory (default: the embedded SmolLM2-135M)"
    )
    serve.add_argument("--preset", metavar="NAME", help="a deployment to start from: local, qwen-tp, r1-tp, r1-dp")
    serve.add_argument("--prefill", type=int, metavar="N", help="prefill nodes")
    serve.add_argument("--decode", type=int, metavar="N", help="decode nodes")
    serve.add_argument("--colocated", type=int, metavar="N", help="nodes that do both, instead of the other two")
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default: 8000)")
    serve.add_argument("--dtype", help="bf16 or fp32 (default: bf16)")
    _add_settings_arguments(serve)
    serve.set_defaults(run=_serve)


def _add_settings_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="YAML settings, such as clusters/local.yaml")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="any one setting; repeatable"
    )


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="one prefill and two decode nodes, real prompts, and a report of every handoff",
        description="Starts a local cluster, answers a handful of prompts at once, reports every handoff, compares the "
        "answers with a colocated engine's, and ends.",
        allow_abbrev=False,
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    _add_settings_arguments(demo)
    demo.set_defaults(run=_demo)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a running server from the terminal",
        description="Talks to a running server from the terminal.",
        allow_abbrev=False,
    )
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    chat.add_argument("--model", help="default: the server's first")
    chat.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest (default: %(default)s)")
    chat.set_defaults(run=_chat)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure transfers, prefill/decode against colocated serving, or steps by several ranks",
        description="Measures; every figure is printed with its configuration.",
        epilog="Each lists options of its own: pdserve bench transport --help",
        add_help=False,  # so that the benchmarks answer it themselves
        allow_abbrev=False,
    )
    bench.add_argument(
        "what",
        nargs="?",
        choices=("transport", "serve", "ranks"),
        help="page writes, whole requests under load, or a step by two ranks",
    )
    bench.set_defaults(run=_bench, print_help=bench.print_help)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or a transfer to another one, before anything is started",
        description="Checks libraries, devices and limits of this machine; or, with --listen here and --peer there, "
        "moves verified bytes between two machines. Exit status 1 if anything fails.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument("--config", metavar="FILE", help="YAML settings that the nodes would be started with")
    doctor.add_argument("--library", metavar="PATH", help="the libfabric to look at (default: what a node would take)")
    doctor.add_argument("--provider", metavar="NAME", help="of the transfer (default: as two nodes would choose)")
    sides = doctor.add_mutually_exclusive_group()
    sides.add_argument(
        "--listen",
        nargs="?",
        const="18580",
        metavar="PORT",
        help="wait for a --peer at PORT or HOST:PORT (default: 18580)",
    )
    sides.add_argument("--peer", metavar="HOST[:PORT]", help="transfer to and from the doctor that listens there")
    doctor.set_defaults(run=_doctor)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="print what a handoff would move, before there is a cluster",
        description="Computes what would be done, and prints it; nothing is started.",
        allow_abbrev=False,
    )
    transfer = plan.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "transfer",
        help="which rank writes what to which, over which NICs, and the count that the decode side waits for",
        description="Prints the transfer plan of one handoff: segments, bytes, writes and NICs of every pair of ranks, "
        "and the expected count.",
        epilog="example: pdserve plan transfer --model deepseek-r1 --prefill tp8 --decode dp8 --prompt 4097 --page 64",
        allow_abbrev=False,
    )
    add_transfer_arguments(transfer)
    transfer.set_defaults(run=_plan_transfer)


def _serve(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    _check_port_is_free(settings)

    from pdserve.observe import progress, set_up_logging

    set_up_logging()
    with progress("loading Ray"):
        from actors.launch import launch
    with launch(settings) as server:
        print(f"pdserve: serving at {server.url}, Ctrl-C or SIGTERM ends it", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("pdserve: ending", flush=True)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, DEMO_SETTINGS)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"--json: {arguments.json.absolute().parent} is not a directory")

    from pdserve import demo
    from pdserve.observe import set_up_logging

    set_up_logging("WARNING")
    return demo.run(settings, arguments.json)


def _chat(arguments: argparse.Namespace) -> int:
    from pdserve.chat import run_chat

    run_chat(arguments.url, arguments.model, temperature=arguments.temperature)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.what is None:
        arguments.print_help()
        return 0 if arguments.rest in (["--help"], ["-h"]) else EXIT_USAGE
    if arguments.what == "transport":
        from pdserve.bench.transport import cli as transport

        return transport.main(arguments.rest)
    if arguments.what == "ranks":
        from pdserve.bench.ranks import cli as ranks

        return ranks.main(arguments.rest)
    from pdserve.bench import serve

    return serve.main(arguments.rest)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.provider is not None and arguments.listen is None and arguments.peer is None:
        raise ConfigError("--provider is of the transfer: give it together with --listen or --peer")
    if arguments.library is not None and not Path(arguments.library).is_file():
        raise ConfigError(f"--library: no file {arguments.library!r}; allowed: the path of a libfabric.so.1")

    from pdserve.doctor.command import DoctorOptions, run

    names = ("config", "library", "provider", "listen", "peer", "json")
    return run(DoctorOptions(**{name: getattr(arguments, name) for name in names}))


def _plan_transfer(arguments: argparse.Namespace) -> int:
    from pdserve.plan.command import TransferOptions, run

    return run(TransferOptions(**{field.name: getattr(arguments, field.name) for field in fields(TransferOptions)}))


def _settings(arguments: argparse.Namespace, default_overrides: dict[str, Any] | None = None) -> Settings:
    """The settings of one command: defaults, then the file, then `--set`, then flags. Raises ConfigError."""
    from pdserve.config import load_settings, parse_override

    overrides: dict[str, Any] = {} if arguments.config else dict(default_overrides or {})
    overrides |= dict(parse_override(text) for text in arguments.overrides)
    for flag, key in FLAG_KEYS.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            overrides[key] = value
    settings = load_settings(arguments.config, overrides)
    _check_model_exists(settings)
    return settings


def _check_model_exists(settings: Settings) -> None:
    from pdserve.config import EMBEDDED_MODEL

    # With a cluster of its own the nodes may have directories that this host has not.
    if settings.model.path == EMBEDDED_MODEL or settings.ray_address is not None:
        return
    if not Path(settings.model.path).expanduser().is_dir():
        raise ConfigError(
            f"model.path: no directory {settings.model.path!r} here; allowed: a local Hugging Face directory "
            f"or {EMBEDDED_MODEL} (nothing is downloaded)"
        )


def _check_port_is_free(settings: Settings) -> None:
    """A port that is taken would show only after the nodes have loaded the model."""
    import socket

    host, port = settings.http.host, settings.http.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"http.host, http.port: cannot listen on {host} port {port}: {error.strerror}; "
                "choose another with --port, or 0 for any free one"
            ) from error

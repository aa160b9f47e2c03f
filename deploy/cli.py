"""The `dango` command. What takes long to import is imported only in `_run`, where Ctrl-C is already ours."""

import argparse
import os
import sys
from collections.abc import Sequence

ABOUT = """\
Dango serves a language model over three pools: prefill instances compute the KV cache of prompts, a
KVCache pool keeps it in CPU memory and finds it again by prefix, decode instances stream the answers. A
Conductor places each request. Clients speak OpenAI's HTTP API.
"""

EXAMPLES = """\
examples:
  dango serve                      everything on this machine, with a small real model
  dango chat                       talk with it, in another terminal
  dango serve --decode 2           two decode instances
  dango prefill --help             one instance by itself: its flags and settings
  dango kvcache stats              what a running pool holds; also lookup, pin, unpin, remove, clear
  dango sim hit-rates              what a cache of some size could reuse of two public traces
"""

MODULES = {
    "conductor": "conductor",
    "prefill": "prefill_pool",
    "kvcache": "kvcache_pool",
    "decode": "decode_pool",
    "sim": "simulator",
}
"""Verbs that become a process of their own: each has its own flags and `--help`."""

VERBS = {
    "serve": "start everything on this machine",
    "chat": "talk with a running service in the terminal",
    "conductor": "start the Conductor alone: HTTP, placement, registry",
    "prefill": "start one prefill instance",
    "kvcache": "start one KVCache instance: memory, and perhaps the directory; or ask a pool that runs",
    "decode": "start one decode instance",
    "sim": "run the services on virtual time: traces, overload, policies compared",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; that of Ctrl-C is 130, as in a shell."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str] | None) -> int:
    from deploy import chat, serve

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in MODULES:
        module = MODULES[arguments[0]]
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments[1:]])
    parser, parsers = _parser()
    if not arguments:
        parser.print_help()
        return 0
    serve.add_arguments(parsers["serve"])
    chat.add_arguments(parsers["chat"])
    parsed = parser.parse_args(arguments)
    return serve.serve(parsed) if parsed.verb == "serve" else chat.chat(parsed)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each verb."""
    from importlib.metadata import version

    parser = argparse.ArgumentParser(
        prog="dango",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dango {version('dango-serve')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers = {verb: verbs.add_parser(verb, help=sentence) for verb, sentence in VERBS.items()}
    return parser, parsers


if __name__ == "__main__":
    sys.exit(main())

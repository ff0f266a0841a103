"""`moonpool COMMAND …`: finds the command, runs it, turns a failure into one line and an exit status."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from moonpool.arguments import Command, CommandGroup, OneLineParser, add_commands, with_default_command
from moonpool.commands import bench, chat, config, keys, plan, replay, serve, simulate, status, up
from moonpool.errors import EXIT_FAILURE, CommandError

COMMANDS: tuple[Command | CommandGroup, ...] = (
    up.COMMAND,
    serve.COMMAND,
    status.COMMAND,
    config.GROUP,
    keys.GROUP,
    chat.COMMAND,
    bench.GROUP,
    simulate.GROUP,
    plan.COMMAND,
    replay.COMMAND,
)

EXIT_INTERRUPTED = 130
"""By custom 128 + SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            # Here, and not at the interpreter's end, where nobody could say what it means.
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output is gone (`moonpool status | head`): nobody to tell, nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _run(arguments: Sequence[str] | None) -> int:
    parser = OneLineParser(prog="moonpool", description="KV-cache-centric, disaggregated LLM serving.")
    parser.add_argument("--version", action="version", version=f"moonpool {version('moonpool')}")
    add_commands(parser, COMMANDS)
    words = with_default_command(sys.argv[1:] if arguments is None else arguments, COMMANDS)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        # By the command's own parser: it is that one's --help that lists what there is.
        options.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    command: Command = options.command
    try:
        return command.run(options)
    except CommandError as error:
        print(f"{options.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"{options.prog}: error: {_told(error)}", file=sys.stderr)
        return EXIT_FAILURE


def _told(error: OSError) -> str:
    """What the machine refuses: the file, or the address that the text names, and why."""
    if error.filename is not None and error.strerror is not None:
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{', '.join(files)}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())

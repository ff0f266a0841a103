"""How a command fails: one line for standard error, and an exit status (DESIGN §10)."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


class CommandError(Exception):
    """The command cannot be carried out; its text is the one line on standard error. Exit status 1."""

    exit_status = EXIT_FAILURE


class UsageError(CommandError):
    """What was typed makes no sense; the text names the flag and what is allowed. Exit status 2."""

    exit_status = EXIT_USAGE

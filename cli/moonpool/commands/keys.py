"""`moonpool keys new TENANT`, `moonpool keys hash`: API keys for gateways, and the hashes that they keep.

`new` prints one object with `--json`: {"tenant", "key", "hash"}. The key is shown once: nothing keeps it.
"""

import argparse
import getpass
import json
import sys

from gateway.tenants.api_keys import KEY_CHARS_MAX, hash_line, new_key
from gateway.tenants.tenants import NAME_RULE, TENANT_NAME
from moonpool.arguments import Command, CommandGroup
from moonpool.errors import EXIT_OK, UsageError


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is to be")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_hash_arguments(_: argparse.ArgumentParser) -> None:
    """A key as an argument would be in the shell's history: it is read from standard input."""


def run_new(options: argparse.Namespace) -> int:
    tenant: str = options.tenant
    if not TENANT_NAME.fullmatch(tenant):
        raise UsageError(f"TENANT {NAME_RULE}, not {tenant[:64]!r}")
    key = new_key()
    hashed = hash_line(key)
    if options.json:
        print(json.dumps({"tenant": tenant, "key": key, "hash": hashed}))
        return EXIT_OK
    print(f"the key, which is shown this once and kept nowhere:\n  {key}\n")
    print(
        f'in the file that api_keys_file names:\n  [tenants.{_table_name(tenant)}]\n  keys = ["{hashed}"]\n'
    )
    print(f"or in the environment of the gateway:\n  MOONPOOL_API_KEYS={tenant}={hashed}")
    return EXIT_OK


def run_hash(_: argparse.Namespace) -> int:
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline(KEY_CHARS_MAX + 2)
    key = key.strip()
    if not 0 < len(key) <= KEY_CHARS_MAX:
        raise UsageError(f"standard input must hold one line with a key of 1 to {KEY_CHARS_MAX} characters")
    print(hash_line(key))
    return EXIT_OK


def _table_name(tenant: str) -> str:
    """As TOML wants it: a dot in a bare name would begin a table within the table."""
    return f'"{tenant}"' if "." in tenant else tenant


GROUP = CommandGroup(
    "keys",
    "make API keys for gateways",
    (
        Command("new", "make a key for a tenant and print it with its hash", add_new_arguments, run_new),
        Command("hash", "print the hash of a key from standard input", add_hash_arguments, run_hash),
    ),
)

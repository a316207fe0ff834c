"""The flags that name one tenant's prompts."""

from __future__ import annotations

import argparse

from tieredkv.keys import tenant, tenant_salt
from tieredkv.units import unicode_text


def add_salts(command: argparse.ArgumentParser) -> None:
    """Add the flags, of which more than one must hold."""
    command.add_argument("--salt", type=unicode_text, metavar="TEXT", help="stored under this salt")
    command.add_argument(
        "--cache-salt",
        type=unicode_text,
        metavar="TEXT",
        help="stored for requests with this cache_salt",
    )
    command.add_argument(
        "--api-key",
        type=unicode_text,
        metavar="KEY",
        help="stored for requests with this key, by a server with --cache-salt-from-api-key",
    )
    command.add_argument("--unsalted", action="store_true", help="stored without a salt")


def given_salt(options: argparse.Namespace) -> bytes | None:
    """The salt of the namespaces that are meant, empty for the unsalted ones; None for any.

    Ends the command if the flags contradict each other.
    """
    salted = any(text is not None for text in (options.salt, options.cache_salt, options.api_key))
    if options.unsalted and salted:
        options.parser.error("--unsalted contradicts --salt, --cache-salt and --api-key")
    if not salted:
        return b"" if options.unsalted else None
    whose = tenant(options.api_key or "", options.cache_salt or "")
    return tenant_salt((options.salt or "").encode(), whose)

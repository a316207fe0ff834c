"""A hook of mkdocs: what GitHub and Python-Markdown read in two ways."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """In tables a `|` of code is written `\\|`: GitHub drops the backslash, mkdocs keeps it."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)

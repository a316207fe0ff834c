"""A hook of mkdocs: what GitHub and Python-Markdown read in two ways."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """In tables a `|` of code has to be written `\\|`; GitHub drops the backslash, mkdocs doesn't."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)

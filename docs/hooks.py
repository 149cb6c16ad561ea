"""For mkdocs: docstrings have Sphinx's roles and literal blocks, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:meth|class|func|mod|data|attr|exc|obj):(?=<code>)")
_LITERAL = re.compile(r"<p>::</p>|:(?=:</p>)")


def on_page_content(html: str, **_: Any) -> str:
    """Names as code; a colon before a block of code."""
    return _LITERAL.sub("", _ROLE.sub("", html)).replace("<code>~", "<code>")

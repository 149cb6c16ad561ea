"""``python -m roundpipe_fx``: see :mod:`roundpipe_fx.command_line.main`."""

from __future__ import annotations

import sys

from roundpipe_fx.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())

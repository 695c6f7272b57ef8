"""``python -m gemini``: the ``gemini`` command."""

from __future__ import annotations

import sys

from gemini.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

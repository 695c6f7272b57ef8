"""``python -m gemini_bench``: ``gemini bench`` where this is on the path but not installed."""

from __future__ import annotations

import sys

from gemini.cli.main import main
from gemini_bench.cli.bench import add_parser

if __name__ == "__main__":
    sys.argv.insert(1, "bench")  # records say the command as it is usually called
    sys.exit(main(added={"bench": add_parser}))

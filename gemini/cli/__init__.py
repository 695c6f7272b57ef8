"""The ``gemini`` command: one module per subcommand, each with ``add_parser(subparsers)``."""

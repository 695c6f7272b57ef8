"""The common parts of all training jobs: loop, directory, display, signals and summary."""

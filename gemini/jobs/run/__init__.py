"""What every job of training has: loop, directory, display, signals, summary."""

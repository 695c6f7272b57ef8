"""The machine and the process: sizes, files, locks, threads, random generators, devices."""

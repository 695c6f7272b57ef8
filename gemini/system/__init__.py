"""What the machine and the process are: sizes, files, locks, threads, random generators, devices."""

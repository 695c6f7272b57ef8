"""Communication between processes: groups, messages, agreement, and detection of missing ranks."""

"""Ready-made programs over the runtime, a folder each."""

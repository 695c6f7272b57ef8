"""Programs that use a trained model: merge adapters, sample texts, export files."""

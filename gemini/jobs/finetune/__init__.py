"""Fine-tunes a Hugging Face checkpoint under byte budgets (``gemini finetune``)."""

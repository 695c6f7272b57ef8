"""A checkpoint of Hugging Face, fine-tuned under byte budgets (``gemini finetune``)."""

"""JSONL files to samples, and samples to batches."""

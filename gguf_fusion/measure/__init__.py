"""Measuring: speed in the manner of llama-bench, quality in the manner of llama-perplexity."""

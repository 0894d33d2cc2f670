"""lm-evaluation-harness on fused models: its model class, and a task that runs generated programs."""

"""A small battery of prompts in eight categories: a smoke test of what experts and strategies can do."""

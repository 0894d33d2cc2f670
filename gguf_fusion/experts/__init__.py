"""Experts: whatever turns a token path into a row of logits."""

"""Strategies written as trees of laws."""

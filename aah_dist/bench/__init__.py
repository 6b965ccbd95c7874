"""Benchmarks; each is a module with a table as its output."""

"""Preparation of a run: its inputs are read and checked before anything starts. No torch."""

"""Masks: their algebra, the programs they trace into, and their block tables."""

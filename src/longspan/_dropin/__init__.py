"""Attention that models call by torch's names, spanning devices."""

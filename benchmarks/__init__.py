"""Measurements beside peers; each script prints ratios and writes JSON under ``results/``."""

"""Harnesses several papers need, one a module: long-context tasks, perplexity, pass@k, classification, calibration."""

"""Measure speed and quality of models, describe folders and machines, and test kernels."""

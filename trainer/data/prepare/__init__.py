"""Preparation of raw data sets and their generators."""

"""Assay: language-model pretraining that can prove what it did."""

__version__ = "0.1.0"

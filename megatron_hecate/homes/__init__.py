"""Experts that change homes."""

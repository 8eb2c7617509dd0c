"""Moves of experts between homes."""

"""Measurements and the demonstration. Not part of the installed package."""

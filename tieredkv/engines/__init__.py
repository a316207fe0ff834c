"""Stores that other people build and run, behind one small contract."""

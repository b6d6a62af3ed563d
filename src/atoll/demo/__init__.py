"""Owns the demonstration. Does not know how updates travel.

Start reading at `train`.
"""

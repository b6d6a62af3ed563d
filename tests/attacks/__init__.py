"""Attacks on a run; most of them succeeded against 0.1.0.

The coordinator is a process of its own; the attacker sends any bytes it likes.
"""

"""Attacks on a run: each test was a successful attack on 0.1.0 and fails there.

The coordinator is a process of its own; the attacker sends any bytes it likes.
"""

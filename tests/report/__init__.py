"""Tests of `atoll.report`."""

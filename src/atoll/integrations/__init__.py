"""Owns how training code written for somebody else's library joins a run of ours.

Does not know how updates travel: any exchange will do.
Start reading at `transformers` or `lightning`, which share `rows`; `torchft` is apart.
"""

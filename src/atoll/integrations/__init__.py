"""Owns how training code written for another library joins a run.

Does not know how updates travel: any exchange will do.
Start reading at `transformers` or `lightning`, which share `data`; `torchft` is apart.
"""

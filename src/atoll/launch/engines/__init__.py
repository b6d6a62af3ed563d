"""One module per engine: a file of its name, or a package if it is more than a file.

Each has `open_launcher(options) -> Launcher`, and is the only one to import its SDK.
"""

"""A trained run in use: indexes of item vectors, exports to files and databases, and the HTTP service.

It reads run folders and never trains. Command-line parsing is in sparring.cli.
"""

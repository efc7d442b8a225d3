"""Attention backends, one file each: a ``BACKEND`` record named like its file. A file dropped in here is offered."""

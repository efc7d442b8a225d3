"""Attention backends: a file holds ``BACKEND`` named like it, or ``BACKENDS``. A file dropped in here is offered."""

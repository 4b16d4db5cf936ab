"""Our training steps against TRL's; `__main__.py` says how they are compared.

torch and the like are imported where they are used: the parent of the measured processes stays small, as a
child's peak memory can't be read below what its parent had.
"""

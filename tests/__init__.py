"""The guards. A package, so that test files can share the modules beside them."""

import os

# Before torch loads OpenMP: threads that spin while they wait for one another made this suite 25 times as slow on two
# cores that had other work too. Waiting passively costs nothing measurable on idle ones.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

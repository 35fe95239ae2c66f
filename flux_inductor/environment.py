"""The environment as bytes, for variables that are read anew at every call."""

import os

# os.environ.get() raises and catches an exception for a variable that is not set, which costs 0.5 us.
values: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]

"""Work on the headers of a large checkpoint without looks at whether its values are garbage.

In: a block, or a function. Out: the same, with Python's search for cycles switched off until its
end.

Easy to get wrong: values that are not in a cycle are freed all the same. A plan makes half a
million small ones that stay; going through them again and again took a quarter of its time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Search for no cycles inside of this block; on in the end if it was on before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""In a folder of PYTHONPATH, makes Triton's interpreter faster in every process that interprets kernels."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreted.faster import make_the_interpreter_faster

    make_the_interpreter_faster()

"""The demo for Hugging Face Spaces and for `python app.py`; everything is in `lcs/app`."""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

from lcs.app.page import build, launch

demo = build()

if __name__ == "__main__":
    launch(demo)

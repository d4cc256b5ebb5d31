"""The paper's SDXL study on any `StableDiffusionXLPipeline`, and the small one this project trains to run it on.

captions -> tokenizer -> build -> views -> autoencoder -> training -> package   make and ship mini-sdxl
hooks -> pixel, features, regions, judge, composition -> study                 look inside an SDXL-class model
"""

import os

# Before transformers is imported: it warns of image processors without torchvision, which nothing here uses.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

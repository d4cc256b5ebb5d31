"""The artifact: every table and figure of the paper, regenerated into one folder, with a verdict per claim.

`python -m lcs artifact` runs it (`make artifact`, `docker run --gpus all lcs artifact`).

    steps.py       what a step is: a name, the checkpoints it needs, a function that draws
    registry.py    all steps, in the order they run
    context.py     what a step may ask for: models, counts (stored once, used by many steps), where to save
    runner.py      runs steps, skips what is unchanged, resumes, prints times
    claims.py      the paper's claims and the rules by which each is judged
    report.py      report.html and report.md
    samples.py, conditioning.py, tables.py, locality.py, color.py, cifar.py, theory.py, sdxl.py   the steps
"""

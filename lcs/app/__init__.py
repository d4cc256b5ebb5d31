"""The demo: a Gradio app over `lcs`, one module per tab.

checks.py   what a visitor may ask for; everything from outside passes here
models.py   which checkpoints are shipped, a bounded cache of them, one compute lane with cancel
draw.py     pictures, boards and curves as small HTML and SVG
inputs.py   model picker, board of conditions and links, shared by the tabs
length.py, locality.py, compare.py, sdxl.py, results.py   the tabs
page.py     the page: theme, tabs, links, server settings
"""

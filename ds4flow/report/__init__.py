"""Run directories as pages and plots: one self-contained HTML file, PNG and SVG images.

Nothing of a run is changed, and a page needs nothing but itself.
"""
